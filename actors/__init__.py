"""The actor: vLLM behind a gateway, the trajectory API, provenance and the weight receiver."""
