"""What the tests compare with; nothing in the library imports it."""
