"""A worker process of a pool: starting, messaging, monitoring and ending it, and the code that runs in it."""
