//! The one who plans steps on a pool.
//!
//! There is one at a time. What is released waits for every step that is open, so a second one could fill the pool's
//! steps while the first one's device is busy; it could not take back what the first one's requests hold, so both could
//! wait for each other for ever; and it would not know whose content a block has that it is to zero.

use super::BlockPool;
use crate::error::{Error, Result};
use crate::sync::Ordering;
use std::sync::Arc;

/// The right to plan steps on a pool, until it is dropped.
#[derive(Debug)]
pub(crate) struct Planner(Arc<BlockPool>);

impl Planner {
    /// # Errors
    /// [`Error::WrongState`] if somebody else has it.
    pub(crate) fn of(pool: &Arc<BlockPool>) -> Result<Self> {
        // Acquire pairs with the Release of `drop`: what the last planner released comes before.
        if pool.is_planned.swap(true, Ordering::Acquire) {
            return Err(Error::WrongState(
                "the pool has a scheduler already, and one at a time plans on it: let that one and its batches go \
                 first, or make a pool for each"
                    .to_owned(),
            ));
        }
        Ok(Self(Arc::clone(pool)))
    }
}

impl Drop for Planner {
    fn drop(&mut self) {
        self.0.is_planned.store(false, Ordering::Release);
    }
}
