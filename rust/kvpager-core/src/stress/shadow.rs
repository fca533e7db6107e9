//! Who has every block, kept beside the pool and told of nothing by it.

use super::report::Violation;
use crate::ids::BlockHandle;
use crate::sync::{AtomicU64, Ordering};

/// Steps that are told apart; more than can be open at once.
const EPOCHS: u64 = 1 << 15;

/// What is known of a block, as one word.
#[derive(Clone, Copy)]
struct Owner {
    /// Generation of the last handle that was seen.
    generation: u32,
    /// References in workers' hands. An indexed block counts one, its worker's.
    references: u16,
    /// The worker that it was handed to.
    thread: u8,
    /// Whether it was ever handed out.
    issued: bool,
    /// Whether this generation was ever shared.
    shared: bool,
}

impl Owner {
    const fn pack(self) -> u64 {
        (self.generation as u64) << 32
            | (self.references as u64) << 16
            | (self.thread as u64) << 8
            | (self.issued as u64) << 1
            | self.shared as u64
    }

    const fn unpack(word: u64) -> Self {
        Self {
            generation: (word >> 32) as u32,
            references: (word >> 16) as u16,
            thread: (word >> 8) as u8,
            issued: word & 2 != 0,
            shared: word & 1 != 0,
        }
    }
}

const ONE: u64 = 1 << 16;

/// The owner map.
///
/// References are counted down before a block is released and up after it was retained, so a block that the pool
/// hands out has none here unless somebody still holds it. Orderings are relaxed: on the machines that this runs on
/// an exchange is a fence anyway; missing orderings are for loom and ThreadSanitizer to find, not for this.
pub(super) struct Shadow {
    owners: Box<[AtomicU64]>,
    /// By block: the newest step of a worker that released it while that step was open; 0 for none.
    waits: Box<[AtomicU64]>,
    /// By epoch: the newest one that is closed, or about to be.
    closing: Box<[AtomicU64]>,
}

impl Shadow {
    pub(super) fn new(num_blocks: u32) -> Self {
        let words = |count: u64| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self { owners: words(num_blocks.into()), waits: words(num_blocks.into()), closing: words(EPOCHS) }
    }

    fn owner(&self, block: BlockHandle) -> &AtomicU64 {
        &self.owners[block.id().0 as usize]
    }

    /// Notes blocks that the pool handed to a worker, and sees one that somebody has or may still read.
    pub(super) fn hand_out(&self, thread: usize, blocks: &[BlockHandle]) -> Result<(), Violation> {
        for &block in blocks {
            let Some(cell) = self.owners.get(block.id().0 as usize) else {
                return Err(Violation::new(format!(
                    "block {} was handed out, which the pool has not",
                    block.id()
                )));
            };
            let now = Owner {
                generation: block.generation(),
                references: 1,
                thread: thread as u8,
                issued: true,
                shared: false,
            };
            let before = Owner::unpack(cell.swap(now.pack(), Ordering::Relaxed));
            if before.references > 0 {
                return Err(Violation::new(format!(
                    "block {} was handed to thread {thread} while thread {} got it in generation {} and {} references \
                     are held",
                    block.id(),
                    before.thread,
                    before.generation,
                    before.references
                )));
            }
            let ahead = block.generation().wrapping_sub(before.generation);
            if before.issued && (ahead == 0 || ahead > u32::MAX / 2) {
                return Err(Violation::new(format!(
                    "block {} was handed out in generation {} after generation {}: old handles are valid",
                    block.id(),
                    block.generation(),
                    before.generation
                )));
            }
            self.check_step(block)?;
        }
        Ok(())
    }

    fn check_step(&self, block: BlockHandle) -> Result<(), Violation> {
        let cell = &self.waits[block.id().0 as usize];
        let epoch = if cell.load(Ordering::Relaxed) == 0 { 0 } else { cell.swap(0, Ordering::Relaxed) };
        if epoch > 0 && self.closing[(epoch % EPOCHS) as usize].load(Ordering::Relaxed) < epoch {
            return Err(Violation::new(format!(
                "block {} was handed out although step {epoch}, in which it was released, is open",
                block.id()
            )));
        }
        Ok(())
    }

    /// Notes new references of a worker that holds the blocks.
    pub(super) fn retained(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            let cell = self.owner(block);
            cell.fetch_or(1, Ordering::Relaxed);
            cell.fetch_add(ONE, Ordering::Relaxed);
        }
    }

    /// Notes that a worker is about to give a reference of each block up, while its newest open step is `epoch` (0
    /// for none).
    pub(super) fn giving_up(&self, blocks: &[BlockHandle], epoch: u64) {
        for &block in blocks {
            if epoch > 0 {
                self.waits[block.id().0 as usize].fetch_max(epoch, Ordering::Relaxed);
            }
            self.owner(block).fetch_sub(ONE, Ordering::Relaxed);
        }
    }

    /// Takes `giving_up` back: the call was refused.
    pub(super) fn held_again(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            self.owner(block).fetch_add(ONE, Ordering::Relaxed);
        }
    }

    /// Whether a worker that holds these blocks is known to be the only one, since none of them was shared in this
    /// generation. (That the references are down to one is not enough: another worker's release may be under way.)
    pub(super) fn never_shared(&self, blocks: &[BlockHandle]) -> bool {
        blocks.iter().all(|&block| !Owner::unpack(self.owner(block).load(Ordering::Relaxed)).shared)
    }

    /// References of a block in workers' hands.
    pub(super) fn references(&self, block: BlockHandle) -> u16 {
        Owner::unpack(self.owner(block).load(Ordering::Relaxed)).references
    }

    /// Notes that a step is about to close.
    pub(super) fn closing(&self, epoch: u64) {
        self.closing[(epoch % EPOCHS) as usize].fetch_max(epoch, Ordering::Relaxed);
    }

    /// Blocks that any worker holds. Exact while nothing moves.
    pub(super) fn num_in_hand(&self) -> u64 {
        let held = |cell: &&AtomicU64| Owner::unpack(cell.load(Ordering::Relaxed)).references > 0;
        self.owners.iter().filter(held).count() as u64
    }
}
