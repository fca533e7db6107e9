//! Steps of a steady state without a model, for counting instructions: `steady RUNNING STEPS [on]`, with the recording of phases or without.
//!
//! `benches/python/scheduler_profile.py` runs it under valgrind, built with and without the recording of phases.

use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::prefix_index::{EvictionPolicy, IndexConfig, PrefixIndex};
use kvpager_core::scheduler::{Request, Scheduler, SchedulerConfig, TenantConfig};
use kvpager_core::{Error, Result};
use std::sync::Arc;

const BLOCK_SIZE: u32 = 16;
const PROMPT: u32 = 64;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [running, steps, recording @ ..] = arguments.as_slice() else {
        return Err(Error::InvalidArgument("usage: steady RUNNING STEPS [on]".to_owned()));
    };
    let number = |text: &str| {
        text.parse::<u32>().map_err(|error| Error::InvalidArgument(format!("{text:?}: {error}")))
    };
    run(number(running)?, number(steps)?, recording == ["on"])
}

fn run(running: u32, steps: u32, is_recorded: bool) -> Result<()> {
    let max_tokens = steps + 2;
    let num_blocks = running * ((PROMPT + max_tokens) / BLOCK_SIZE + 2);
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() })?;
    let index = PrefixIndex::new(
        Arc::clone(&pool),
        IndexConfig { block_size: BLOCK_SIZE, eviction: EvictionPolicy::Lru },
    )?;
    let config = SchedulerConfig {
        block_size: BLOCK_SIZE,
        max_batch_tokens: running * (PROMPT + BLOCK_SIZE),
        max_running: running,
        max_model_tokens: PROMPT + BLOCK_SIZE + max_tokens,
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::new(pool, Some(index), config)?;
    let tenant = scheduler.add_tenant(&TenantConfig::new("bench", num_blocks))?;
    for i in 0..running {
        let prompt = (0..PROMPT + i % BLOCK_SIZE).map(|place| i * 131 + place).collect();
        scheduler.submit(Request::new(Arc::clone(&tenant), prompt, max_tokens))?;
    }
    let token_start: Vec<i32> = (0..=running as i32).collect();
    let tokens: Vec<i32> = (0..running as i32).collect();
    if is_recorded {
        scheduler.begin_phases(0)?;
    }
    for _ in 0..=steps {
        let batch = scheduler.step(0)?;
        scheduler.commit(batch.step_id, &token_start, &tokens)?;
    }
    Ok(())
}
