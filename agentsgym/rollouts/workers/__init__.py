"""The processes of a pool: how one is started, addressed, watched and ended, and the code that runs in it."""
