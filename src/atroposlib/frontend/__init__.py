"""Pages made from recorded groups."""
