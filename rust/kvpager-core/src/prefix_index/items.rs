//! Items inside a prompt: images, audio, embeddings, whose placeholder tokens do not say what they are.
//!
//! Token ids end at 2^31; the ids from there on name items. An item's digest and the token that it stands on are
//! interned to such an id, which stands at the item's offset in what the tree compares: a block with an item, and
//! every block after it, is matched only by a prompt that has the same item at the same place. Blocks before it
//! are shared as ever.
//!
//! An id is given once in the life of the index and never again, so that a digest can be forgotten at any moment: what
//! was keyed with its id before is not matched then, and never taken for another item's. Forgotten is what nothing
//! resident has and nobody has asked for of late, after as many new ones as the pool has blocks.

use super::PrefixIndex;
use crate::error::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first id that names an item.
const FIRST_ITEM: u32 = 1 << 31;
/// Bytes of a digest.
const MAX_DIGEST_BYTES: usize = 64;
/// New digests before any is forgotten; as many as the pool has blocks, if that is more.
const MIN_KEPT: usize = 4096;

/// Something inside a prompt that its token ids do not tell apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Position of its first token.
    pub offset: u32,
    /// Digest of its content, 1 to 64 bytes.
    pub digest: Vec<u8>,
}

/// Ids of items by the token that they stand on and their digests.
pub(super) struct Items(Mutex<Interned>);

type Key = (u32, Box<[u8]>);

struct Interned {
    ids: HashMap<Key, Entry>,
    /// Ids given so far.
    num_given: u32,
    digest_bytes: usize,
    /// Counts how often was looked for what can be forgotten.
    period: u64,
    /// How many there are when that is done next.
    full_at: usize,
    min_kept: usize,
}

struct Entry {
    id: u32,
    /// The period of its last use.
    used: u64,
}

impl Items {
    /// For an index over so many blocks.
    pub(super) fn new(num_blocks: u32) -> Self {
        let min_kept = MIN_KEPT.max(num_blocks as usize);
        let ids = HashMap::new();
        let interned =
            Interned { ids, num_given: 0, digest_bytes: 0, period: 0, full_at: min_kept, min_kept };
        Self(Mutex::new(interned))
    }

    fn lock(&self) -> MutexGuard<'_, Interned> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let interned = self.lock();
        // A byte of control beside each place of the table.
        interned.ids.capacity() * (size_of::<(Key, Entry)>() + 1) + interned.digest_bytes
    }
}

impl Interned {
    fn id(&mut self, token: u32, digest: &[u8]) -> Result<u32> {
        let key = (token, digest.into());
        if let Some(entry) = self.ids.get_mut(&key) {
            entry.used = self.period;
            return Ok(entry.id);
        }
        if self.num_given >= u32::MAX - FIRST_ITEM {
            return Err(Error::invalid("the index has given all of its 2^31 ids to different items"));
        }
        let id = FIRST_ITEM + self.num_given;
        self.num_given += 1;
        self.digest_bytes += digest.len();
        self.ids.insert(key, Entry { id, used: self.period });
        Ok(id)
    }

    /// Begins a period; returns it. Until it is over nobody else begins one because the table is full.
    fn begin(&mut self) -> u64 {
        self.full_at = usize::MAX;
        self.period += 1;
        self.period
    }

    /// Forgets what is neither resident nor was used since a period. What was used of late does not count for when
    /// this is done next: it would put that off further each time.
    fn forget(&mut self, resident: &HashSet<u32>, since: u64) {
        self.ids.retain(|_, entry| entry.used >= since || resident.contains(&entry.id));
        self.digest_bytes = self.ids.keys().map(|(_, digest)| digest.len()).sum();
        self.full_at = self.ids.len() + self.min_kept.max(resident.len());
        self.ids.shrink_to_fit();
    }
}

/// Checks items of a prompt: in order of offset, one at a place, with digests of a length that is one.
///
/// # Errors
/// `InvalidArgument` that names the item.
pub fn check_items(items: &[Item], num_tokens: usize) -> Result<()> {
    for (i, item) in items.iter().enumerate() {
        let (offset, length) = (item.offset, item.digest.len());
        if offset as usize >= num_tokens {
            return Err(Error::invalid(format!(
                "items[{i}] is at offset {offset}, the prompt has {}",
                crate::count_of(num_tokens, "token")
            )));
        }
        if length == 0 || length > MAX_DIGEST_BYTES {
            return Err(Error::invalid(format!(
                "items[{i}] has a digest of {}, must have 1 to {MAX_DIGEST_BYTES}",
                crate::count_of(length, "byte")
            )));
        }
        if i > 0 && items[i - 1].offset >= offset {
            return Err(Error::invalid(format!(
                "items[{i}] is at offset {offset}, not after {} of the one before",
                items[i - 1].offset
            )));
        }
    }
    Ok(())
}

impl PrefixIndex {
    /// Writes items into a piece of a prompt that begins at position `start`, so that it can be matched and inserted:
    /// at each item's offset its id replaces the token. The piece is for the index only, not for the model.
    ///
    /// # Errors
    /// `InvalidArgument` when 2^31 ids were given.
    ///
    /// # Complexity
    /// Constant per item, averaged: it looks through all blocks of the index for digests to forget, but only after as
    /// many new digests as there are blocks, at least 4,096.
    pub fn key_items(&self, items: &[Item], start: usize, tokens: &mut [u32]) -> Result<()> {
        let mut interned = self.items.lock();
        for item in items {
            let place = (item.offset as usize).checked_sub(start).and_then(|place| tokens.get_mut(place));
            if let Some(token) = place {
                *token = interned.id(*token, &item.digest)?;
            }
        }
        let is_full = interned.ids.len() >= interned.full_at;
        let period = is_full.then(|| interned.begin());
        drop(interned);
        if let Some(period) = period {
            self.forget_items_before(period - 1);
        }
        Ok(())
    }

    /// Forgets every digest that nothing resident has.
    pub(super) fn forget_items(&self) {
        let period = self.items.lock().begin();
        self.forget_items_before(period);
    }

    /// Forgets the digests that nothing resident has and that were not used since a period. What is inserted meanwhile was
    /// keyed since the one before this.
    fn forget_items_before(&self, period: u64) {
        let mut resident = HashSet::new();
        for (_, namespace) in self.namespaces.all() {
            // Under one lock for the whole tree: between two, blocks might move to where was looked before.
            let tree = namespace.read_tree();
            let view = self.view();
            let live = (0..tree.num_slots()).filter(|&id| tree.is_live(id));
            for &block in live.flat_map(|id| &tree.node(id).blocks) {
                resident.extend(view.row(block).iter().filter(|&&token| token >= FIRST_ITEM));
            }
        }
        self.items.lock().forget(&resident, period);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_is_resident_does_not_put_off_forgetting_the_rest() {
        const RESIDENT: u32 = 3_000;
        let items = Items::new(1);
        let mut interned = items.lock();
        let resident: HashSet<u32> =
            (0..RESIDENT).map(|number| interned.id(0, &number.to_be_bytes()).unwrap()).collect();
        for number in RESIDENT..200_000 {
            interned.id(0, &number.to_be_bytes()).unwrap();
            if interned.ids.len() >= interned.full_at {
                let period = interned.begin();
                interned.forget(&resident, period - 1);
            }
            assert!(interned.ids.len() <= RESIDENT as usize + 2 * MIN_KEPT, "{}", interned.ids.len());
        }
        assert_eq!(interned.id(0, &7u32.to_be_bytes()).unwrap(), FIRST_ITEM + 7);
    }
}
