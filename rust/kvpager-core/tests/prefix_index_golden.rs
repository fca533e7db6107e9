//! Leaf LRU on a real trace, against figures that an independent implementation found.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests")]

use flate2::read::GzDecoder;
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope};
use kvpager_core::{BlockHandle, BlockId, Error};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;

const BLOCK_SIZE: usize = 512;
const LOOKUP_BLOCKS: usize = 276_491;

/// The block ids of each request's full prompt blocks, or `None` with a reason on stderr.
fn conversation_trace() -> Option<Vec<Vec<u32>>> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let shared = std::env::var_os("KVPAGER_SHARED").map_or(beside, PathBuf::from);
    let path = shared.join("traces/mooncake_conversation_trace.jsonl.gz");
    let Ok(file) = std::fs::File::open(&path) else {
        eprintln!("skipped: no trace at {} (set KVPAGER_SHARED)", path.display());
        return None;
    };
    let parse = |line: String| {
        let row: serde_json::Value = serde_json::from_str(&line).unwrap();
        let num_full = row["input_length"].as_u64().unwrap() as usize / BLOCK_SIZE;
        let ids = row["hash_ids"].as_array().unwrap();
        ids[..num_full].iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    Some(BufReader::new(GzDecoder::new(file)).lines().map(|line| parse(line.unwrap())).collect())
}

/// One request at a time: look up, then insert its full prompt blocks. Returns (looked up, hit).
fn replay(requests: &[Vec<u32>], num_blocks: u32, eviction: EvictionPolicy) -> (usize, usize) {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    let config = IndexConfig { block_size: BLOCK_SIZE as u32, eviction };
    let index = PrefixIndex::new(pool.clone(), config).unwrap();
    let scope = ShareScope::Private("tenant".into());
    let namespace = index.namespace(&scope, &Fingerprint::default(), account).unwrap();
    let (mut looked_up, mut hit) = (0, 0);
    let mut blocks = Vec::new();
    for ids in requests {
        let tokens: Vec<u32> = ids.iter().flat_map(|&id| std::iter::repeat_n(id, BLOCK_SIZE)).collect();
        blocks.clear();
        let mut pin = index.match_whole(namespace, &tokens, &mut blocks).unwrap();
        looked_up += ids.len();
        hit += blocks.len();
        let mut new = vec![BlockHandle::new(0, BlockId(0)); ids.len() - blocks.len()];
        while let Err(error) = pool.allocate(account, &mut new) {
            let Error::NeedsReclaim { needed, free, .. } = error else { panic!("{error}") };
            assert!(index.evict((needed - free) as u32) > 0);
        }
        let done = index.extend(&mut pin, &tokens[blocks.len() * BLOCK_SIZE..], &mut new).unwrap();
        assert_eq!((done.num_indexed, done.num_duplicates), (new.len(), 0));
    }
    index.check_invariants().unwrap();
    pool.check_invariants().unwrap();
    (looked_up, hit)
}

#[test]
fn test_leaf_lru_hits_of_the_conversation_trace_are_the_known_ones() {
    let Some(requests) = conversation_trace() else { return };
    for (num_blocks, expected) in [(34_179, 99_115), (8_544, 55_906), (1_708, 15_037)] {
        let found = replay(&requests, num_blocks, EvictionPolicy::Lru);
        assert_eq!(found, (LOOKUP_BLOCKS, expected), "{num_blocks} blocks");
    }
}

#[test]
fn test_learned_eviction_beats_the_best_known_policy_on_chat() {
    let Some(requests) = conversation_trace() else { return };
    for (num_blocks, at_least) in
        [(1_708, 9.9), (3_417, 13.0), (8_544, 22.2), (17_089, 29.0), (34_179, 35.0), (85_449, 37.0)]
    {
        let (looked_up, hit) = replay(&requests, num_blocks, EvictionPolicy::Learned);
        let rate = 100.0 * hit as f64 / looked_up as f64;
        assert!(rate > at_least, "{num_blocks} blocks: {rate:.2} %");
    }
}

#[test]
fn test_clock_eviction_keeps_up_with_lru_on_chat() {
    let Some(requests) = conversation_trace() else { return };
    for (num_blocks, at_least) in
        [(1_708, 5.2), (3_417, 7.9), (8_544, 19.2), (17_089, 28.0), (34_179, 35.0), (85_449, 37.5)]
    {
        let (looked_up, hit) = replay(&requests, num_blocks, EvictionPolicy::Clock);
        let rate = 100.0 * hit as f64 / looked_up as f64;
        assert!(rate > at_least, "{num_blocks} blocks: {rate:.2} %");
    }
}
