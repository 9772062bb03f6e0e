"""What `pack` would do: parts, layout, room and time, without writing."""
