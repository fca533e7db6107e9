//! KV bytes per token of a real model config, and device bytes to blocks.
