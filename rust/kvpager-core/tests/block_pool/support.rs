//! What the tests of the pool share.

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error};
use std::sync::Arc;

pub(crate) type Pool<const F: u8> = Arc<BlockPool<F>>;

pub(crate) fn pool<const F: u8>(num_blocks: u32) -> (Pool<F>, AccountId) {
    let config = PoolConfig { num_blocks, ..PoolConfig::default() };
    let pool = BlockPool::<F>::with_fault(config).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    (pool, account)
}

pub(crate) fn blank(count: usize) -> Vec<BlockHandle> {
    vec![BlockHandle::new(0, BlockId(0)); count]
}

pub(crate) fn take<const F: u8>(
    pool: &BlockPool<F>,
    account: AccountId,
    count: usize,
) -> Result<Vec<BlockHandle>, Error> {
    let mut out = blank(count);
    pool.allocate(account, &mut out)?;
    Ok(out)
}

/// The whole of what a pool shows, to see that a failed call changed nothing.
pub(crate) fn picture<const F: u8>(pool: &BlockPool<F>) -> String {
    pool.check_invariants().unwrap();
    let accounts: Vec<_> =
        (0..pool.num_accounts()).map(|id| pool.account_stats(AccountId(id)).unwrap()).collect();
    format!("{:?} {accounts:?}", pool.stats())
}

/// Everything is free again, and can be had.
pub(crate) fn assert_all_free<const F: u8>(pool: &BlockPool<F>) {
    pool.check_invariants().unwrap();
    let stats = pool.stats();
    assert_eq!(stats.free, stats.capacity, "{stats:?}");
    assert_eq!((stats.reserved, stats.quarantined, stats.cached), (0, 0, 0), "{stats:?}");
    for id in 0..pool.num_accounts() {
        let stats = pool.account_stats(AccountId(id)).unwrap();
        assert_eq!(stats.committed, 0, "{stats:?}");
    }
}
