"""Files that a kill leaves in the old state or the new one: writing, locks, arrays, segments."""
