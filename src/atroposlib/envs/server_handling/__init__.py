"""How environments talk to inference servers: configuration, routing, backends and token-exact sessions."""
