"""Playing many episodes at once, and recording their tokens exactly."""
