//! Faults that can be planted into a pool, to show that the checks see them.
//!
//! A pool is `BlockPool<FAULT>`; `FAULT` is [`NONE`] unless a test or `kvpager stress --inject` asks for one of
//! these. The parameter is a constant, so a pool without a fault has no trace of them.

/// No fault: what every user gets.
pub const NONE: u8 = 0;
/// A release leaves the generation as it was, so old handles stay valid.
pub const SAME_GENERATION: u8 = 1;
/// Free permits are published before the bits that back them.
pub const EARLY_PERMIT: u8 = 2;
/// A summary bit is cleared without looking at its word again, and the words are never scanned.
pub const BLIND_SUMMARY: u8 = 3;
/// A reference is added without comparing the generation.
pub const BLIND_RETAIN: u8 = 4;
/// Eviction does not claim the block first, so two evictions of one block both count.
pub const BLIND_EVICT: u8 = 5;
/// A release does not look at whether the block is already on its way to being free.
pub const BLIND_RELEASE: u8 = 6;
/// An allocation that is refused keeps the capacity that it took.
pub const KEEP_CAPACITY: u8 = 7;
/// Blocks are handed out again although a step that may read them is open.
pub const SKIP_QUARANTINE: u8 = 8;
/// A block that is quarantined while its step closes is left on the list.
pub const LOSE_LATE_PUSH: u8 = 9;
/// Borrowing looks at the limit only: the guarantees of others are lent out too.
pub const LEND_GUARANTEES: u8 = 10;
/// A dropped reservation gives nothing back.
pub const LEAK_RESERVATION: u8 = 11;
/// A dropped magazine gives nothing back.
pub const LEAK_MAGAZINE: u8 = 12;
/// A change of quota reads what is used and writes it back, without an exchange.
pub const TORN_QUOTA: u8 = 13;
/// A batch is not checked before its first block is touched, and keeps what it had done when it fails.
pub const KEEP_PARTIAL: u8 = 14;
/// A reference is dropped by a load and a store.
pub const TORN_REFERENCES: u8 = 15;
/// A claim acquires nothing: what a block's last owner did may come after what the next does.
pub const RELAXED_BITS: u8 = 16;

/// Every fault with its name, as `kvpager stress --inject` and the mutant tests list them.
pub const ALL: [(u8, &str); 16] = [
    (SAME_GENERATION, "same-generation"),
    (EARLY_PERMIT, "early-permit"),
    (BLIND_SUMMARY, "blind-summary"),
    (BLIND_RETAIN, "blind-retain"),
    (BLIND_EVICT, "blind-evict"),
    (BLIND_RELEASE, "blind-release"),
    (KEEP_CAPACITY, "keep-capacity"),
    (SKIP_QUARANTINE, "skip-quarantine"),
    (LOSE_LATE_PUSH, "lose-late-push"),
    (LEND_GUARANTEES, "lend-guarantees"),
    (LEAK_RESERVATION, "leak-reservation"),
    (LEAK_MAGAZINE, "leak-magazine"),
    (TORN_QUOTA, "torn-quota"),
    (KEEP_PARTIAL, "keep-partial"),
    (TORN_REFERENCES, "torn-references"),
    (RELAXED_BITS, "relaxed-bits"),
];
