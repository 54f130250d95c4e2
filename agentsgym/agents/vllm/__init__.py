"""Sample with vLLM: an engine in this process, or servers, and the weights they are given."""
