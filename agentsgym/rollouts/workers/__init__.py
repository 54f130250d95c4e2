"""The processes of a pool: how one is started, spoken to, watched and ended, and what runs in it."""
