"""What `kvpager plan` needs besides the geometry: a model's files, block sizes, and checks on real memory."""
