"""What the policy learns from in addition to the advantages of its turns."""
