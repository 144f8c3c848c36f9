"""Small real models that need no model hub: a random tiny Llama made in code, and SmolLM2-135M out of a PyPI wheel."""
