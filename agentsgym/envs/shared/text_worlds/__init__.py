"""The base class of text-world environments, and players that follow a walkthrough."""
