"""Launch of engines: the commands of a deployment."""
