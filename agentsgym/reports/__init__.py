"""Results for people: ``tables`` as plain text, ``plots`` as pictures."""
