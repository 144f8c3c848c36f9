"""From prompts and scored groups to microbatches."""
