"""One machine, all roles: the plan of a run (from a YAML file), the supervisor of its processes, its report."""
