//! Request state, admission and batches.
