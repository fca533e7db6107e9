//! Scopes: the chain from public to private, publishing, and purging.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    ChainPin, EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, Purged, ScopeChain, ShareScope,
};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error, NamespaceId};
use std::sync::Arc;

const BLOCK_SIZE: usize = 2;

struct World {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    accounts: [AccountId; 3],
    public: NamespaceId,
    group: NamespaceId,
    alice: NamespaceId,
    bob: NamespaceId,
}

fn world(num_blocks: u32) -> World {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let accounts = [(); 3].map(|()| pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap());
    let config = IndexConfig { block_size: BLOCK_SIZE as u32, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::new(pool.clone(), config).unwrap();
    let intern = |scope: ShareScope, account: usize| {
        index.namespace(&scope, &Fingerprint::default(), accounts[account]).unwrap()
    };
    let public = intern(ShareScope::Public("system".into()), 0);
    let group = intern(ShareScope::Group("team".into()), 1);
    let alice = intern(ShareScope::Private("alice".into()), 2);
    let bob = intern(ShareScope::Private("bob".into()), 2);
    World { pool, index, accounts, public, group, alice, bob }
}

/// Block `b` is the tokens `[b, b]`; one more token follows, which is never matched.
fn prompt(blocks: &[u32]) -> Vec<u32> {
    whole(blocks).into_iter().chain([0]).collect()
}

fn whole(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|&block| [block; BLOCK_SIZE]).collect()
}

impl World {
    fn chain(&self, private: NamespaceId) -> ScopeChain {
        self.index.chain(&[self.public, self.group, private]).unwrap()
    }

    fn allocate(&self, account: usize, num_blocks: usize) -> Vec<BlockHandle> {
        let mut blocks = vec![BlockHandle::new(0, BlockId(0)); num_blocks];
        self.pool.allocate(self.accounts[account], &mut blocks).unwrap();
        blocks
    }

    fn publish(&self, path: &[u32]) -> Pin {
        let mut pin = self.index.root(self.public).unwrap();
        let mut blocks = self.allocate(0, path.len());
        self.index.publish(&mut pin, &whole(path), &mut blocks).unwrap();
        pin
    }

    fn matched(&self, private: NamespaceId, path: &[u32]) -> (ChainPin, Vec<BlockHandle>) {
        let mut blocks = Vec::new();
        let pin = self.index.match_chain(&self.chain(private), &prompt(path), &mut blocks).unwrap();
        assert_eq!(pin.num_blocks(), blocks.len());
        self.check();
        (pin, blocks)
    }

    /// Runs a request to its end over the chain; returns how many blocks were found.
    fn run(&self, private: NamespaceId, path: &[u32]) -> usize {
        let (mut pin, found) = self.matched(private, path);
        let mut new = self.allocate(2, path.len() - found.len());
        self.index.extend_chain(&mut pin, &whole(&path[found.len()..]), &mut new).unwrap();
        self.check();
        found.len()
    }

    fn check(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
    }
}

#[test]
fn test_a_public_prefix_is_continued_privately() {
    let w = world(32);
    let published = w.publish(&[1, 2, 3]);
    assert_eq!(w.run(w.alice, &[1, 2, 3, 4, 5]), 3);
    assert_eq!(w.run(w.alice, &[1, 2, 3, 4, 5]), 5);
    let (pin, _) = w.matched(w.alice, &[1, 2, 3, 4, 5]);
    assert_eq!(pin.parts().collect::<Vec<_>>(), [(w.public, 3), (w.alice, 2)]);
    assert_eq!(w.matched(w.bob, &[1, 2, 3, 4, 5]).1.len(), 3);
    assert_eq!(published.num_blocks(), 3);
}

#[test]
fn test_a_public_block_is_charged_once_to_the_public_account() {
    let w = world(32);
    let _published = w.publish(&[1, 2, 3]);
    let pins = [w.alice, w.bob, w.alice].map(|tenant| w.matched(tenant, &[1, 2, 3]));
    let committed = |account: usize| w.pool.account_stats(w.accounts[account]).unwrap().committed;
    assert_eq!((committed(0), committed(2)), (3, 0));
    drop(pins);
    assert_eq!((committed(0), committed(2)), (3, 0));
}

#[test]
fn test_nothing_but_publish_inserts_publicly() {
    let w = world(8);
    let mut pin = w.index.root(w.public).unwrap();
    let mut blocks = w.allocate(0, 1);
    let error = w.index.extend(&mut pin, &whole(&[1]), &mut blocks).unwrap_err();
    assert_eq!(error.to_string(), "only publish inserts into a public scope");
    let mut pin = w.index.root(w.alice).unwrap();
    let error = w.index.publish(&mut pin, &whole(&[1]), &mut blocks).unwrap_err();
    assert_eq!(error.to_string(), format!("namespace {} is not public", w.alice));
    assert!(w.index.chain(&[w.public]).is_err());
    assert!(w.index.chain(&[w.alice, w.public]).is_err());
    assert!(w.index.chain(&[w.alice, w.bob]).is_err());
    assert!(matches!(w.index.chain(&[]), Err(Error::InvalidArgument(_))));
}

#[test]
fn test_no_requests_make_a_private_block_visible_to_others() {
    let w = world(64);
    let _published = w.publish(&[1]);
    for path in [[1, 2, 3], [1, 2, 4], [5, 6, 7]] {
        w.run(w.alice, &path);
        w.run(w.alice, &path);
        assert_eq!(w.matched(w.bob, &path).1.len(), usize::from(path[0] == 1));
    }
}

#[test]
fn test_a_private_continuation_survives_eviction_and_return_of_its_head() {
    let w = world(32);
    let published = w.publish(&[1, 2]);
    w.run(w.alice, &[1, 2, 3, 4]);
    drop(published);
    let purged = w.index.purge(&ShareScope::Public("system".into()));
    assert_eq!(purged, Purged { num_namespaces: 1, num_evicted: 2 });
    assert_eq!(w.matched(w.alice, &[1, 2, 3, 4]).1.len(), 0);
    w.check();
    let _published = w.publish(&[1, 2]);
    assert_eq!(w.matched(w.alice, &[1, 2, 3, 4]).1.len(), 4);
    w.index.purge(&ShareScope::Private("alice".into()));
    assert_eq!(w.matched(w.alice, &[1, 2, 3, 4]).1.len(), 2);
    w.index.clear();
    assert_eq!((w.pool.stats().held, w.pool.stats().cached), (2, 0));
}

#[test]
fn test_a_longer_public_prefix_does_not_hide_a_continuation_of_a_shorter_one() {
    let w = world(32);
    let _short = w.publish(&[1, 2]);
    w.run(w.alice, &[1, 2, 3, 4, 5]);
    let _long = w.publish(&[1, 2, 3]);
    let (pin, _) = w.matched(w.alice, &[1, 2, 3, 4, 5]);
    assert_eq!(pin.parts().collect::<Vec<_>>(), [(w.public, 2), (w.alice, 3)]);
    let (pin, _) = w.matched(w.alice, &[1, 2, 3, 9]);
    assert_eq!(pin.parts().collect::<Vec<_>>(), [(w.public, 3)]);
}

#[test]
fn test_a_purge_is_complete_and_lets_running_requests_end() {
    let w = world(32);
    let mut pin = w.index.root(w.alice).unwrap();
    let mut blocks = w.allocate(2, 3);
    w.index.extend(&mut pin, &whole(&[1, 2, 3]), &mut blocks).unwrap();
    w.run(w.alice, &[5, 6]);
    w.run(w.bob, &[1, 2, 3]);
    let salted = ShareScope::Salted { tenant: "alice".into(), salt: vec![1] };
    let salted = w.index.namespace(&salted, &Fingerprint::default(), w.accounts[2]).unwrap();
    w.run(salted, &[7, 8]);

    let purged = w.index.purge(&ShareScope::Private("alice".into()));
    assert_eq!(purged, Purged { num_namespaces: 2, num_evicted: 4 });
    for (namespace, path, expected) in
        [(w.alice, [1, 2, 3], 0), (w.alice, [5, 6, 0], 0), (salted, [7, 8, 0], 0), (w.bob, [1, 2, 3], 6)]
    {
        assert_eq!(w.index.peek_prefix(namespace, &prompt(&path)).unwrap(), expected);
    }
    // The running request goes on, unseen, and new content is kept beside it.
    let mut more = w.allocate(2, 1);
    assert_eq!(w.index.extend(&mut pin, &whole(&[4]), &mut more).unwrap().num_indexed, 1);
    assert_eq!(w.index.peek_prefix(w.alice, &prompt(&[1, 2, 3, 4])).unwrap(), 0);
    w.run(w.alice, &[1, 2]);
    assert_eq!(w.index.peek_prefix(w.alice, &prompt(&[1, 2])).unwrap(), 4);
    w.check();
    drop(pin);
    w.check();
    assert_eq!(w.pool.stats().cached, 2 + 3);
    assert_eq!(w.index.peek_prefix(w.alice, &prompt(&[1, 2])).unwrap(), 4);
}

#[test]
fn test_many_purges_leave_no_roots_behind() {
    let w = world(8);
    let bytes = |w: &World| w.index.memory_bytes();
    for _ in 0..200 {
        w.run(w.alice, &[1, 2]);
        w.index.purge(&ShareScope::Private("alice".into()));
    }
    let before = bytes(&w);
    for _ in 0..2000 {
        w.run(w.alice, &[1, 2]);
        w.index.purge(&ShareScope::Private("alice".into()));
    }
    assert_eq!(bytes(&w), before);
    assert_eq!(w.pool.stats().free, 8);
    w.check();
}

fn salted(w: &World, salt: u32) -> kvpager_core::Result<NamespaceId> {
    let scope = ShareScope::Salted { tenant: "alice".into(), salt: salt.to_le_bytes().to_vec() };
    w.index.namespace(&scope, &Fingerprint::default(), w.accounts[2])
}

#[test]
fn test_namespaces_of_salts_are_counted_limited_and_reclaimed() {
    let w = world(32);
    w.index.set_max_salts(3);
    let first = salted(&w, 0).unwrap();
    w.run(first, &[1, 2]);
    let before = w.index.num_namespaces();
    for salt in 1..200 {
        let id = salted(&w, salt).unwrap();
        assert_eq!(salted(&w, salt).unwrap(), id);
        assert_eq!(w.run(id, &[1, 2]), 0, "salt {salt} sees nothing of an earlier one");
        assert_eq!(w.run(id, &[1, 2]), 2);
    }
    assert_eq!(w.index.num_namespaces(), before + 2);
    let stats = w.index.salt_stats(w.accounts[2]).unwrap();
    assert_eq!((stats.num_salted, stats.max_salted, stats.num_reclaimed), (3, 3, 197));
    // The number of the first one is nobody's now, though its place is another salt's.
    let error = w.index.peek_prefix(first, &prompt(&[1, 2])).unwrap_err();
    assert!(error.to_string().contains("given to another one"), "{error}");
    assert!(w.index.match_prefix(first, &prompt(&[1, 2]), &mut Vec::new()).is_err());
    assert_eq!(w.pool.account_stats(w.accounts[2]).unwrap().cached, 6);
    w.index.clear();
    assert_eq!(w.pool.stats().free, 32);
    w.check();
}

#[test]
fn test_a_salt_in_use_is_not_taken_away() {
    let w = world(32);
    w.index.set_max_salts(2);
    let ids = [salted(&w, 0).unwrap(), salted(&w, 1).unwrap()];
    let pins = ids.map(|id| w.index.root(id).unwrap());
    let error = salted(&w, 2).unwrap_err();
    assert!(matches!(error, Error::Refused { retryable: true, .. }), "{error}");
    drop(pins);
    let third = salted(&w, 2).unwrap();
    assert!(w.index.root(ids[0]).is_err());
    assert!(w.index.root(ids[1]).is_ok());
    assert!(w.index.root(third).is_ok());
}
