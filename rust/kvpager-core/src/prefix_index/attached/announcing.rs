//! Telling followers where further layer groups have their blocks.
//!
//! A follower knows an attached block by the digest of the first group's block of the same positions. What can be
//! matched is told: of public scopes what is published.

use super::State;
use crate::ids::{BlockHandle, NamespaceId};
use crate::prefix_index::PrefixIndex;
use crate::prefix_index::events::{Digest, EventKind, num_purges};
use crate::prefix_index::tree::Tree;
use crate::sync::RwLockReadGuard;
use crossbeam_utils::CachePadded;

/// What followers call an attached block.
#[derive(Clone, Copy)]
pub(super) struct Name {
    namespace: NamespaceId,
    /// How often it had been purged: since then followers know nothing of what was there.
    num_purges: u32,
    digest: Digest,
    group: u32,
}

impl PrefixIndex {
    /// The name of what is attached to a block of a namespace, and the lock under which it stays so. None if nobody is
    /// told.
    pub(super) fn name_attached(
        &self,
        id: NamespaceId,
        first: BlockHandle,
        group: usize,
    ) -> Option<(RwLockReadGuard<'_, CachePadded<Tree>>, Name)> {
        let events = self.events()?;
        let namespace = self.namespaces.get(id).ok()?;
        let tree = namespace.read_tree();
        let digest = events.known(namespace, first)?;
        let group = group as u32 + u32::from(!self.has_homes());
        Some((tree, Name { namespace: id, num_purges: num_purges(namespace), digest, group }))
    }

    /// An attached block can be matched from now on. The caller still has the lock that came with its name.
    pub(super) fn announce(&self, state: &mut State, id: u32, name: Name) {
        let (Some(events), Some(known)) = (self.events(), state.names.get_mut(id as usize)) else { return };
        *known = Some(name);
        let Name { namespace, digest, group, .. } = name;
        events.push(namespace, EventKind::Attached { group, digests: vec![digest] });
    }

    /// An attached block can no longer be matched.
    pub(super) fn withdraw(&self, state: &mut State, id: u32) {
        let (Some(events), Some(known)) = (self.events(), state.names.get_mut(id as usize)) else { return };
        let Some(name) = known.take().filter(|name| self.is_known(name)) else { return };
        let Name { namespace, digest, group, .. } = name;
        events.push(namespace, EventKind::Detached { group, digests: vec![digest] });
    }

    fn is_known(&self, name: &Name) -> bool {
        self.namespaces.get(name.namespace).is_ok_and(|namespace| num_purges(namespace) == name.num_purges)
    }

    /// (namespace, digest, group) of what followers know.
    pub(in crate::prefix_index) fn announced<'a>(
        &'a self,
        state: Option<&'a State>,
    ) -> impl Iterator<Item = (NamespaceId, Digest, u32)> + 'a {
        let names = state.into_iter().flat_map(|state| state.names.iter().flatten());
        names.filter(|name| self.is_known(name)).map(|name| (name.namespace, name.digest, name.group))
    }
}
