//! Somebody who follows an index by its events.

#![allow(dead_code, clippy::allow_attributes, unreachable_pub, reason = "each test binary uses its own part")]

use kvpager_core::NamespaceId;
use kvpager_core::prefix_index::{Digest, EventBatch, EventKind, Snapshot};
use std::collections::{HashMap, HashSet};

/// Parent of every known block, and which further layer groups have a block there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Follower {
    parents: HashMap<(NamespaceId, Digest), Digest>,
    attached: HashSet<(NamespaceId, Digest, u32)>,
    next: u64,
}

impl Follower {
    pub fn from_snapshot(snapshot: &Snapshot) -> Self {
        let parents = snapshot.blocks.iter().map(|&(id, parent, digest)| ((id, digest), parent)).collect();
        let attached: HashSet<_> = snapshot.attached.iter().copied().collect();
        assert_eq!(attached.len(), snapshot.attached.len(), "each is told once");
        Self { parents, attached, next: snapshot.next }
    }

    /// How many blocks of further groups it knows.
    pub fn num_attached(&self) -> usize {
        self.attached.len()
    }

    /// Applies events; false if it has to start again.
    pub fn apply(&mut self, batch: &EventBatch) -> bool {
        if batch.must_resync {
            return false;
        }
        let start = self.next;
        for event in batch.events.iter().filter(|event| event.number >= start) {
            assert_eq!(event.number, self.next, "no gaps");
            self.next += 1;
            match &event.kind {
                EventKind::Stored { parent, digests, .. } => {
                    let mut before = *parent;
                    for &digest in digests {
                        let known = self.parents.insert((event.namespace, digest), before);
                        assert_eq!(known, None, "stored once");
                        before = digest;
                    }
                }
                EventKind::Removed { digests } => {
                    for digest in digests {
                        assert!(self.parents.remove(&(event.namespace, *digest)).is_some(), "removed once");
                        let is_parent = self
                            .parents
                            .iter()
                            .any(|((id, _), parent)| *id == event.namespace && parent == digest);
                        assert!(!is_parent, "children go before parents");
                        let is_home = self
                            .attached
                            .iter()
                            .any(|(id, home, _)| (*id, home) == (event.namespace, digest));
                        assert!(!is_home, "further groups go before the first one");
                    }
                }
                EventKind::Cleared => {
                    self.parents.retain(|(id, _), _| *id != event.namespace);
                    self.attached.retain(|(id, ..)| *id != event.namespace);
                }
                EventKind::Attached { group, digests } => {
                    for &digest in digests {
                        assert!(self.parents.contains_key(&(event.namespace, digest)), "its home is known");
                        assert!(self.attached.insert((event.namespace, digest, *group)), "attached once");
                    }
                }
                EventKind::Detached { group, digests } => {
                    for &digest in digests {
                        assert!(self.attached.remove(&(event.namespace, digest, *group)), "detached once");
                    }
                }
            }
        }
        true
    }
}
