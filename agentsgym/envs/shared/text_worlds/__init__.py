"""What the text worlds have in common: commands that are read, and players that follow a walkthrough."""
