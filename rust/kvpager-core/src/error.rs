//! The one error type of the crate. Variants are the caller's possible reactions; each carries its numbers.

use crate::ids::{AccountId, BlockId};

/// Result of the crate's fallible calls.
pub type Result<T> = std::result::Result<T, Error>;

/// What is wrong with a block handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleFault {
    /// The id is not one of the pool's.
    NeverIssued,
    /// The block was released since the handle was made.
    Stale,
    /// The call would take more references away than the caller can hold.
    OverRelease,
    /// The block is shared or indexed where an exclusively held one is needed, or the other way round.
    WrongState,
}

impl std::fmt::Display for HandleFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NeverIssued => "was never issued by this pool",
            Self::Stale => "is stale: the block was released since",
            Self::OverRelease => "would be released more often than it is held",
            Self::WrongState => "is in a state that this call does not accept",
        })
    }
}

/// Why a call was refused. A refused call changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Wait, or ask for less: the pool's capacity is promised or in use.
    #[error("{} needed, {available} of {capacity} uncommitted", count(*needed, "block"))]
    OutOfBlocks {
        /// Blocks asked for.
        needed: u64,
        /// Blocks that were neither held, reserved nor quarantined.
        available: u64,
        /// Blocks of the pool.
        capacity: u64,
    },
    /// Wait, or ask for less: the account's own limit.
    #[error("{} needed, account {account} {}", count(*needed, "block"), room(*available, *limit))]
    OverQuota {
        /// The account that asked.
        account: AccountId,
        /// Blocks asked for.
        needed: u64,
        /// What is left under the limit.
        available: u64,
        /// The account's limit.
        limit: u64,
    },
    /// Evict cached blocks, then try again: the capacity is granted, but too few blocks are free.
    #[error("{} needed, {free} free and {cached} cached: evict cached blocks first", count(*needed, "free block"))]
    NeedsReclaim {
        /// Blocks asked for.
        needed: u64,
        /// Blocks in no use at all.
        free: u64,
        /// Blocks that eviction could free.
        cached: u64,
    },
    /// A bug in the caller: a handle that does not name a block it holds.
    #[error("handle of block {id} (generation {generation}) {fault}; the block is at generation {current}")]
    InvalidHandle {
        /// The block named.
        id: BlockId,
        /// The handle's generation.
        generation: u32,
        /// The block's generation now.
        current: u32,
        /// What is wrong.
        fault: HandleFault,
    },
    /// A bug in the caller, or bad input: a value outside its range. The text has the numbers.
    #[error("{0}")]
    InvalidArgument(String),
    /// Ask for less: the memory of the machine, or of the process, does not hold what was to be made.
    #[error("{what} takes {num_bytes} bytes of memory, more than {}", machine(*memory))]
    OutOfMemory {
        /// What was to be made.
        what: String,
        /// Bytes of all that it allocates.
        num_bytes: u64,
        /// The machine's memory, if it is more than that.
        memory: Option<u64>,
    },
    /// A request that was not accepted; resubmitting it as it is cannot help, unless `retryable`.
    #[error("refused: {reason}")]
    Refused {
        /// One sentence with the numbers.
        reason: String,
        /// Whether the same request may be accepted later.
        retryable: bool,
        /// If so, when: an estimate in steps, from the asking tenant's own state.
        retry_after_steps: Option<u64>,
    },
    /// The call is not allowed now: another thread is in the scheduler, a step is open, the id is unknown.
    #[error("{0}")]
    WrongState(String),
}

/// A number with its noun, as texts for people have it: `1 block`, `2 blocks`, `0 entries`, `3 branches`.
pub fn count(number: impl Into<i128>, noun: &str) -> String {
    let number = number.into();
    let (stem, ending) = match noun.strip_suffix('y') {
        _ if number == 1 => (noun, ""),
        Some(stem) => (stem, "ies"),
        None if noun.ends_with("ch") => (noun, "es"),
        None => (noun, "s"),
    };
    format!("{number} {stem}{ending}")
}

/// [`count`] of what a collection holds.
#[must_use]
pub fn count_of(number: usize, noun: &str) -> String {
    count(number as u64, noun)
}

fn machine(memory: Option<u64>) -> String {
    memory.map_or_else(|| "can be had now".to_owned(), |bytes| format!("the machine's {bytes}"))
}

fn room(available: u64, limit: u64) -> String {
    match available {
        0 => format!("has all of its limit of {limit}"),
        _ => format!("may take {available} more of its limit of {limit}"),
    }
}

impl Error {
    /// An [`Error::InvalidArgument`] from anything that prints.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::InvalidArgument(text.into())
    }

    /// The same error for a call that asked for more than the number that was checked says.
    #[must_use]
    pub fn asked_for(mut self, number: u64) -> Self {
        if let Self::OutOfBlocks { needed, .. } | Self::OverQuota { needed, .. } = &mut self {
            *needed = number;
        }
        self
    }

    /// An [`Error::Refused`] that no waiting helps.
    pub fn refused(reason: impl Into<String>) -> Self {
        Self::Refused { reason: reason.into(), retryable: false, retry_after_steps: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular_and_every_other_number_plural() {
        let texts = ["block", "entry", "branch"].map(|noun| [0, 1, 2].map(|number| count_of(number, noun)));
        assert_eq!(texts[0], ["0 blocks", "1 block", "2 blocks"]);
        assert_eq!(texts[1], ["0 entries", "1 entry", "2 entries"]);
        assert_eq!(texts[2], ["0 branches", "1 branch", "2 branches"]);
        assert_eq!(count(-1, "draft"), "-1 drafts");
    }
}
