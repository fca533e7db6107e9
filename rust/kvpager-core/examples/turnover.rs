//! Steps in which sequences end and others begin, without a model: `turnover RUNNING STEPS` prints what they take;
//! under valgrind, what they cost in instructions.
//!
//! Prompts of 256 tokens, half of them in common, and 256 output tokens: the load of `kvpager profile`.

use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::prefix_index::{EvictionPolicy, IndexConfig, PrefixIndex};
use kvpager_core::scheduler::{BatchArrays, Request, Scheduler, SchedulerConfig, Tenant, TenantConfig};
use kvpager_core::{Error, Result};
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_SIZE: u32 = 16;
const PROMPT: u32 = 256;
const OUTPUT: u32 = 256;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [running, steps] = arguments.as_slice() else {
        return Err(Error::InvalidArgument("usage: turnover RUNNING STEPS".to_owned()));
    };
    let number = |text: &str| {
        text.parse::<u32>().map_err(|error| Error::InvalidArgument(format!("{text:?}: {error}")))
    };
    Load::new(number(running)?)?.run(number(steps)?)
}

struct Load {
    scheduler: Scheduler,
    tenant: Arc<Tenant>,
    running: u32,
    num_submitted: u32,
}

impl Load {
    fn new(running: u32) -> Result<Self> {
        let num_blocks = running * ((PROMPT + OUTPUT) / BLOCK_SIZE + 1);
        let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() })?;
        let config = IndexConfig { block_size: BLOCK_SIZE, eviction: EvictionPolicy::Lru };
        let index = PrefixIndex::new(Arc::clone(&pool), config)?;
        let config = SchedulerConfig {
            block_size: BLOCK_SIZE,
            max_batch_tokens: 8192.max(2 * running),
            max_running: running,
            max_model_tokens: PROMPT + OUTPUT,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(pool, Some(index), config)?;
        let tenant = scheduler.add_tenant(&TenantConfig::new("bench", num_blocks))?;
        Ok(Self { scheduler, tenant, running, num_submitted: 0 })
    }

    fn submit(&mut self, max_tokens: u32) -> Result<()> {
        self.num_submitted += 1;
        let own = self.num_submitted * 131;
        let token = |place| if place < PROMPT / 2 { place } else { own + place };
        let prompt = (0..PROMPT).map(token).collect();
        self.scheduler.submit(Request::new(Arc::clone(&self.tenant), prompt, max_tokens))?;
        Ok(())
    }

    /// Runs until so many steps were taken with all places full, and prints the percentiles of their times.
    fn run(mut self, steps: u32) -> Result<()> {
        for place in 0..self.running {
            // They end at different times, as they do after a while.
            self.submit((OUTPUT * (place + 1)).div_ceil(self.running))?;
        }
        let mut times = Vec::new();
        while times.len() < steps as usize {
            let start = Instant::now();
            let batch = self.scheduler.step(0)?;
            let planned = start.elapsed();
            let token_start = starts(&batch.arrays);
            let tokens: Vec<i32> = (0..batch.arrays.sample_rows.len() as i32).collect();
            let start = Instant::now();
            let outcome = self.scheduler.commit(batch.step_id, &token_start, &tokens)?;
            if tokens.len() == self.running as usize {
                times.push(planned + start.elapsed());
            }
            for _ in &outcome.finished {
                self.submit(OUTPUT)?;
            }
        }
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        let line = format!("{} running: p50 {:.1} us, p99 {:.1} us\n", self.running, at(50), at(99));
        let written = std::io::stdout().write_all(line.as_bytes());
        written.map_err(|error| Error::InvalidArgument(error.to_string()))
    }
}

/// One token for each sequence that samples.
fn starts(arrays: &BatchArrays) -> Vec<i32> {
    let mut samples = arrays.sample_rows.iter().peekable();
    let ends = arrays.query_start[1..].iter().scan(0, |count, end| {
        *count += i32::from(samples.next_if(|row| **row == end - 1).is_some());
        Some(*count)
    });
    std::iter::once(0).chain(ends).collect()
}
