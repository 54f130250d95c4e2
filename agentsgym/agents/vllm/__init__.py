"""Sample with vLLM, an engine in this process or servers, and load the trained weights into it."""
