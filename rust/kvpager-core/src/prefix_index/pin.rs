//! A pinned prefix.

use super::PrefixIndex;
use super::learned::History;
use crate::error::Result;
use crate::ids::NamespaceId;
use crate::sync::Ordering;
use std::sync::Arc;

/// Keeps a prefix from being evicted until it is dropped.
///
/// The pin is on the deepest node of the prefix; every block above stays held with it. Not `Clone`: one pin,
/// one release.
pub struct Pin {
    pub(super) index: Arc<PrefixIndex>,
    pub(super) namespace: NamespaceId,
    pub(super) node: u32,
    pub(super) num_blocks: u32,
    /// Purges of the namespace when it was pinned.
    pub(super) num_purges: u32,
    /// Whether this pin's extension made the node.
    pub(super) is_own_node: bool,
    /// What the `learned` policy knows of it.
    pub(super) history: History,
}

impl Pin {
    /// Blocks of the pinned prefix.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks as usize
    }

    /// Whether its namespace was purged since, so that nobody finds what it holds.
    #[must_use]
    pub fn is_purged(&self) -> bool {
        // Relaxed: whoever was told of a purge by `PrefixIndex::num_purges` sees it.
        let now = self.index.namespaces.get(self.namespace).map(|own| own.num_purges.load(Ordering::Relaxed));
        now.ok() != Some(self.num_purges)
    }

    /// One more pin of the same prefix. That costs no capacity, and finds it whatever was purged or inserted since.
    ///
    /// # Errors
    /// `InvalidArgument` if its namespace was given to another salt.
    pub(super) fn again(&self) -> Result<Self> {
        let namespace = self.index.namespaces.get(self.namespace)?;
        self.index.hold((self.namespace, namespace), &namespace.read_tree(), self.node)?;
        Ok(Self {
            index: Arc::clone(&self.index),
            namespace: self.namespace,
            node: self.node,
            num_blocks: self.num_blocks,
            num_purges: self.num_purges,
            is_own_node: false,
            history: self.history.of_look(),
        })
    }

    /// The namespace it was matched in.
    #[must_use]
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.index.unpin(self);
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pin")
            .field("namespace", &self.namespace)
            .field("node", &self.node)
            .field("num_blocks", &self.num_blocks)
            .finish()
    }
}
