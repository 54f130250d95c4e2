"""The exact token record: chat templates read once, transcripts that only grow."""
