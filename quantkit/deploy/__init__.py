"""Launch of engines: commands of a deployment, and the proxy for disaggregated prefill and
decode."""
