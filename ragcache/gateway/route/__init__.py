"""A gateway without an engine, which forwards to replicas that have one."""
