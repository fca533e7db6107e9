//! Look-ups, insertions and evictions in a full index without events, for counting instructions: `index_steady ROUNDS`.
//!
//! `benches/python/events_off.py` runs it under valgrind, built with and without the stream of events.

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope};
use kvpager_core::{Error, Result};

const BLOCK_SIZE: u32 = 16;
const SHARED: u32 = 32 * BLOCK_SIZE;
const OWN: u32 = 32 * BLOCK_SIZE;
/// Requests whose own blocks are resident.
const RESIDENT: u32 = 64;

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let Some(rounds) = rounds else {
        return Err(Error::InvalidArgument("usage: index_steady ROUNDS".to_owned()));
    };
    run(rounds)
}

/// Each round inserts a request of 32 shared blocks and 32 of its own, evicts as many, and looks an older one up.
fn run(rounds: u32) -> Result<()> {
    let num_blocks = (SHARED + OWN * (RESIDENT + 1)) / BLOCK_SIZE;
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() })?;
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks })?;
    let index =
        PrefixIndex::new(pool, IndexConfig { block_size: BLOCK_SIZE, eviction: EvictionPolicy::Lru })?;
    let namespace =
        index.namespace(&ShareScope::Private("bench".into()), &Fingerprint::default(), account)?;
    let mut tokens: Vec<u32> = (0..SHARED + OWN).collect();
    let mut blocks = Vec::new();
    for round in 0..RESIDENT + rounds {
        name(&mut tokens, round);
        blocks.clear();
        drop(index.insert_prefix(namespace, &tokens, &mut blocks)?);
        if round >= RESIDENT {
            index.evict(OWN / BLOCK_SIZE);
            name(&mut tokens, round - RESIDENT / 2);
            blocks.clear();
            drop(index.match_prefix(namespace, &tokens, &mut blocks)?);
        }
    }
    Ok(())
}

/// Makes the own part of a request's tokens.
fn name(tokens: &mut [u32], request: u32) {
    for (i, token) in tokens[SHARED as usize..].iter_mut().enumerate() {
        *token = (request % 4096) << 12 | i as u32;
    }
}
