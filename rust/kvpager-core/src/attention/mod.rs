//! Paged attention, KV append and block copies on host memory.
