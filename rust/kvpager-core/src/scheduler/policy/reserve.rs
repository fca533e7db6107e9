//! `reserve`: the whole life of the request is promised before it runs.

use super::AdmissionRequest;
use crate::scheduler::config::SchedulerConfig;

/// Prompt and maximum output, less the blocks that are pinned already.
pub(super) fn blocks_to_reserve(config: &SchedulerConfig, request: AdmissionRequest) -> u32 {
    config.lifetime_blocks(request.prompt_tokens, request.max_tokens) - request.pinned_blocks
}
