"""What a run begins with and plays: demonstrations to imitate first, tasks, and opponents."""
