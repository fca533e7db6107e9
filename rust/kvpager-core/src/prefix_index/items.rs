//! Items inside a prompt: images, audio, embeddings, whose placeholder tokens do not say what they are.
//!
//! Token ids end at 2^31; the ids from there on name items. An item's digest and the token that it
//! stands on are interned to such an id, exactly and for the life of the index, and it stands at the item's offset in what the tree compares: a block with an item, and
//! every block after it, is matched only by a prompt that has the same item at the same place. Blocks before it
//! are shared as ever.

use super::PrefixIndex;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The first id that names an item.
const FIRST_ITEM: u32 = 1 << 31;
/// Bytes of a digest.
const MAX_DIGEST_BYTES: usize = 64;

/// Something inside a prompt that its token ids do not tell apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Position of its first token.
    pub offset: u32,
    /// Digest of its content, 1 to 64 bytes.
    pub digest: Vec<u8>,
}

/// Ids of items by the token that they stand on and their digests.
#[derive(Default)]
pub(super) struct Items(Mutex<HashMap<Key, u32>>);

type Key = (u32, Box<[u8]>);

impl Items {
    fn id(&self, token: u32, digest: &[u8]) -> Result<u32> {
        let mut ids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (token, digest.into());
        if let Some(&id) = ids.get(&key) {
            return Ok(id);
        }
        let id = u32::try_from(ids.len()).ok().filter(|&count| count < u32::MAX - FIRST_ITEM);
        let id = id.ok_or_else(|| Error::invalid("the index has seen 2^31 different items"))? + FIRST_ITEM;
        ids.insert(key, id);
        Ok(id)
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
                "items[{i}] is at offset {offset}, the prompt has {num_tokens} tokens"
            )));
        }
        if length == 0 || length > MAX_DIGEST_BYTES {
            return Err(Error::invalid(format!(
                "items[{i}] has a digest of {length} bytes, must have 1 to {MAX_DIGEST_BYTES}"
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
    /// `InvalidArgument` after 2^31 different items.
    pub fn key_items(&self, items: &[Item], start: usize, tokens: &mut [u32]) -> Result<()> {
        for item in items {
            let place = (item.offset as usize).checked_sub(start).and_then(|place| tokens.get_mut(place));
            if let Some(token) = place {
                *token = self.items.id(*token, &item.digest)?;
            }
        }
        Ok(())
    }
}
