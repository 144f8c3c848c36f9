"""The engine's decode step on a CPU for models of the Llama form: torch calls without modules, or one compiled function."""
