//! Radix tree over token ids in whole blocks, one root per namespace.
