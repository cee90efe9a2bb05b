"""What recorded runs show: traces of some nodes as one story, for people and for the Perfetto UI."""
