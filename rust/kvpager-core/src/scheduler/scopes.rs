//! Where a tenant's prefixes are looked up and kept: the chain public, group, private of the prefix index.
//!
//! A group and a public scope are tenants themselves: handles of the operator with a quota of their own, to which
//! the blocks that others share are charged. What is submitted with a public handle is *published*: it stays
//! pinned after its request's end, until [`super::Scheduler::unpublish`].

use super::Scheduler;
use super::config::SchedulerConfig;
use super::core::Core;
use super::group_blocks::find_groups;
use super::request::Request;
use super::sequence::Sequence;
use super::tenant::Tenant;
use crate::block_pool::Quota;
use crate::ids::{AccountId, BlockHandle, NamespaceId};
use crate::prefix_index::{ChainPin, Fingerprint, Isolation, PrefixIndex, ScopeChain, ShareScope};
use crate::{Error, Result};
use hashbrown::HashSet;
use std::borrow::Cow;
use std::sync::Arc;

/// Bytes of a client's salt.
const MAX_SALT_BYTES: usize = 256;

/// Who may see what a tenant's requests leave in the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TenantScope {
    /// The tenant alone.
    #[default]
    Private,
    /// Every tenant that names it as its group: a handle of the operator.
    Group,
    /// Every tenant that names it as its public scope: a handle of the operator.
    Public,
}

impl TenantScope {
    /// Reads the option's name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "private" => Ok(Self::Private),
            "group" => Ok(Self::Group),
            "public" => Ok(Self::Public),
            _ => Err(Error::invalid(format!("scope is {name:?}; it is one of private, group, public"))),
        }
    }

    /// The scope's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Group => "group",
            Self::Public => "public",
        }
    }
}

/// Which scopes a look-up may find blocks in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// All of the tenant's chain.
    All,
    /// The tenant's own.
    Own,
}

/// How a tenant shares.
#[derive(Clone, Debug, Default)]
pub struct Sharing {
    /// What it may observe of others.
    pub isolation: Isolation,
    /// Who may see what its requests leave in the index.
    pub scope: TenantScope,
    /// Whose prefixes it may use: a tenant of group scope.
    pub group: Option<Arc<Tenant>>,
    /// Whose prefixes it may use: a tenant of public scope.
    pub public: Option<Arc<Tenant>>,
}

impl Sharing {
    /// Checks what does not depend on the index.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that says what does not go together.
    pub(super) fn check(&self, name: &str, scheduler: u64, has_index: bool) -> Result<()> {
        let refused = |text: &str| Err(Error::invalid(format!("tenant {name:?}: {text}")));
        for (other, scope) in [(&self.group, TenantScope::Group), (&self.public, TenantScope::Public)] {
            let Some(other) = other else { continue };
            if other.scheduler != scheduler {
                return refused("its group and public scope must be of the same scheduler");
            }
            if other.scope() != scope {
                return refused(&format!(
                    "{:?} has {} scope, {} is needed there",
                    other.name,
                    other.scope().name(),
                    scope.name()
                ));
            }
        }
        if self.group.is_some() && self.scope != TenantScope::Private {
            return refused("only a tenant of private scope has a group");
        }
        if self.public.is_some() && self.scope == TenantScope::Public {
            return refused("a public scope has no other public scope");
        }
        if self.isolation == Isolation::Strict && (self.group.is_some() || self.scope == TenantScope::Group) {
            return refused("strict isolation has no group scope");
        }
        if !has_index && (self.group.is_some() || self.public.is_some() || self.scope != TenantScope::Private)
        {
            return refused("sharing needs a prefix index, the scheduler has none");
        }
        Ok(())
    }
}

/// Refuses a `strict` tenant that others could lend from: what is not promised can be taken.
pub(super) fn check_strict(isolation: Isolation, quota: Quota) -> Result<()> {
    if isolation == Isolation::Strict && quota.guaranteed != quota.limit {
        return Err(Error::invalid(format!(
            "strict isolation needs guaranteed = limit, got {} and {}",
            quota.guaranteed, quota.limit
        )));
    }
    Ok(())
}

/// Checks a request's salt: of a length that is worth keeping, and for a tenant that has something to narrow.
pub(super) fn check_salt(request: &Request) -> Result<()> {
    let Some(salt) = &request.salt else { return Ok(()) };
    if salt.is_empty() || salt.len() > MAX_SALT_BYTES {
        return Err(Error::invalid(format!(
            "the salt has {}, must have 1 to {MAX_SALT_BYTES}",
            crate::count_of(salt.len(), "byte")
        )));
    }
    match request.tenant.scope() {
        TenantScope::Private => Ok(()),
        other => Err(Error::invalid(format!(
            "a salt narrows a tenant of private scope; {:?} has {} scope",
            request.tenant.name,
            other.name()
        ))),
    }
}

/// Checks a publication in a model with further layer groups: its prompt's end is what they keep, so it ends there.
pub(super) fn check_publication(config: &SchedulerConfig, request: &Request) -> Result<()> {
    if request.tenant.scope() != TenantScope::Public || !config.is_grouped() || request.max_tokens == 1 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "max_tokens is {}, must be 1: with {} {:?} publishes a prompt and no output",
        request.max_tokens,
        crate::count_of(config.layer_groups.len(), "layer group"),
        request.tenant.name
    )))
}

/// Where a tenant's requests look up and insert.
#[derive(Debug)]
pub(super) struct Scopes {
    /// The chain of a request without a salt.
    chain: ScopeChain,
    /// Its last namespace alone: for when a shared scope has no room to hold what it has.
    own: ScopeChain,
    /// What a salted request has before its own namespace, and who pays for it.
    public: Option<(ScopeChain, AccountId)>,
    fingerprint: Fingerprint,
    account: AccountId,
}

impl Scopes {
    pub(super) fn new(
        index: &PrefixIndex,
        name: &str,
        sharing: &Sharing,
        fingerprint: &Fingerprint,
        account: AccountId,
    ) -> Result<Self> {
        index.set_isolation(account, sharing.isolation)?;
        let scope = match sharing.scope {
            TenantScope::Private => ShareScope::Private(name.to_owned()),
            TenantScope::Group => ShareScope::Group(name.to_owned()),
            TenantScope::Public => ShareScope::Public(name.to_owned()),
        };
        let last = index.namespace(&scope, fingerprint, account)?;
        let shared = [&sharing.public, &sharing.group].into_iter().flatten();
        let mut namespaces: Vec<_> =
            shared.filter_map(|other| other.scopes()).map(|o| o.chain.last()).collect();
        namespaces.push(last);
        let (chain, own) = if sharing.scope == TenantScope::Public {
            (index.publishing_chain(last)?, index.publishing_chain(last)?)
        } else {
            (index.chain(&namespaces)?, index.chain(&[last])?)
        };
        let public = sharing.public.as_ref().and_then(|other| other.scopes());
        let public = public.map(|other| (other.chain.clone(), other.account));
        Ok(Self { chain, own, public, fingerprint: fingerprint.clone(), account })
    }

    /// Where requests without a salt insert.
    pub(super) fn namespace(&self) -> NamespaceId {
        self.chain.last()
    }

    /// The chain of a request. A salt narrows it: to the public scope and a namespace of the tenant's and the salt's.
    pub(super) fn chain(
        &self,
        index: &PrefixIndex,
        tenant: &str,
        salt: Option<&[u8]>,
    ) -> Result<Cow<'_, ScopeChain>> {
        let Some(salt) = salt else { return Ok(Cow::Borrowed(&self.chain)) };
        let scope = ShareScope::Salted { tenant: tenant.to_owned(), salt: salt.to_vec() };
        let own = index.namespace(&scope, &self.fingerprint, self.account)?;
        let mut namespaces: Vec<_> = self.public.iter().map(|public| public.0.last()).collect();
        namespaces.push(own);
        Ok(Cow::Owned(index.chain(&namespaces)?))
    }
}

/// Prefixes that were published, with what keeps them.
#[derive(Debug, Default)]
pub(super) struct Published {
    prefixes: Vec<PublishedPrefix>,
}

#[derive(Debug)]
struct PublishedPrefix {
    /// Position of the tenant.
    owner: usize,
    /// Drops the first group's blocks when it goes.
    _pin: ChainPin,
    /// The first group's blocks.
    blocks: Vec<BlockHandle>,
    /// Blocks of further groups.
    attached: Vec<BlockHandle>,
}

impl Published {
    fn of(&self, tenant: &Tenant) -> impl Iterator<Item = &PublishedPrefix> {
        let owner = tenant.index;
        self.prefixes.iter().filter(move |prefix| prefix.owner == owner)
    }

    /// How many different blocks a tenant has published.
    fn num_blocks(&self, tenant: &Tenant) -> u32 {
        let blocks = self.of(tenant).flat_map(|prefix| prefix.blocks.iter().chain(&prefix.attached));
        blocks.collect::<HashSet<_>>().len() as u32
    }

    /// How many of the blocks of a prefix are published.
    fn num_of(&self, prefix: &[BlockHandle]) -> usize {
        let common = |published: &PublishedPrefix| {
            prefix.iter().zip(&published.blocks).take_while(|(one, other)| one == other).count()
        };
        self.prefixes.iter().map(common).max().unwrap_or(0)
    }

    /// Lets everything of a tenant go; returns how many prefixes there were.
    fn release(&mut self, tenant: &Tenant, index: Option<&PrefixIndex>) -> Result<usize> {
        let before = self.prefixes.len();
        if let Some(index) = index {
            // Before the pins: what goes with its home goes at once then.
            self.of(tenant).try_for_each(|prefix| index.unpublish_attached(&prefix.attached))?;
        }
        self.prefixes.retain(|prefix| prefix.owner != tenant.index);
        Ok(before - self.prefixes.len())
    }
}

/// How many blocks of a request's known tokens the index has now, of the first layer group. Pins and touches nothing.
pub(super) fn peek(index: Option<&Arc<PrefixIndex>>, request: &Request) -> Result<usize> {
    let (true, Some(index), Some(scopes)) = (request.reuse, index, request.tenant.scopes()) else {
        return Ok(0);
    };
    let chain = match scopes.chain(index, &request.tenant.name, request.salt.as_deref()) {
        Err(Error::Refused { retryable: true, .. }) => return Ok(0),
        chain => chain?,
    };
    let keys = request.keys(index, 0, &request.prompt)?;
    Ok(index.peek_chain(&chain, &keys)? / index.config().block_size as usize)
}

/// The blocks that [`find`] would find now of a request's `tokens`. Pins and touches nothing, so they may be gone at any
/// moment. False if it cannot tell: they may lie in several namespaces.
pub(super) fn look_at(
    index: &PrefixIndex,
    request: &Request,
    reach: Reach,
    tokens: &[u32],
    blocks: &mut Vec<BlockHandle>,
) -> Result<bool> {
    let (true, Some(scopes)) = (request.reuse, request.tenant.scopes()) else { return Ok(true) };
    let chain = match scopes.chain(index, &request.tenant.name, request.salt.as_deref()) {
        Err(Error::Refused { retryable: true, .. }) => return Ok(true),
        chain => chain?,
    };
    if reach == Reach::All && chain.namespaces().len() > 1 {
        return Ok(false);
    }
    index.resident_blocks(chain.last(), &request.keys(index, 0, tokens)?, blocks)?;
    Ok(true)
}

/// How many of a request's blocks, as far as they can be spared, its public scope has now. Pins and touches nothing.
pub(super) fn peek_public(
    index: Option<&Arc<PrefixIndex>>,
    request: &Request,
    config: &SchedulerConfig,
) -> Result<u32> {
    let public = request.tenant.scopes().and_then(|scopes| scopes.public.as_ref());
    let (true, true, Some(index), Some((public, _))) = (request.reuse, config.keeps_first(), index, public)
    else {
        return Ok(0);
    };
    let keys = request.keys(index, 0, &request.prompt)?;
    Ok(index.peek_chain(public, &keys)? as u32 / config.block_size)
}

/// Pins what the index has of whole blocks of a request's `tokens`; their blocks go to `blocks`. `None` if it takes
/// no part in reuse.
///
/// Where a group or a public scope has no room in its quota to hold what it has, the tenant's own prefixes still
/// count.
pub(super) fn find(
    index: &Arc<PrefixIndex>,
    request: &Request,
    reach: Reach,
    tokens: &[u32],
    blocks: &mut Vec<BlockHandle>,
) -> Result<Option<ChainPin>> {
    let (true, Some(scopes)) = (request.reuse, request.tenant.scopes()) else { return Ok(None) };
    let chain = scopes.chain(index, &request.tenant.name, request.salt.as_deref())?;
    let keys = request.keys(index, 0, tokens)?;
    let own = || if request.salt.is_some() { index.chain(&[chain.last()]) } else { Ok(scopes.own.clone()) };
    let found = if reach == Reach::Own {
        index.find_chain(&own()?, &keys, blocks)
    } else {
        match index.find_chain(&chain, &keys, blocks) {
            Err(Error::OverQuota { account, .. }) if account != request.tenant.account => {
                index.find_chain(&own()?, &keys, blocks)
            }
            found => found,
        }
    };
    match found {
        // Homes are short, not blocks: nothing that the request could wait for.
        Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) if index.has_homes() => {
            index.find_chain(&own()?, &[], blocks).map(Some)
        }
        found => found.map(Some),
    }
}

impl Core {
    /// Blocks that a running sequence can ever have, as quotas and what is published are by now.
    pub(super) fn reach_of(&self, sequence: &Sequence) -> Result<u32> {
        let tenant = &sequence.request.tenant;
        let public = tenant.scopes().and_then(|scopes| scopes.public.as_ref()).map(|public| public.0.last());
        let parts = sequence.pin.iter().flat_map(ChainPin::parts);
        let shared: usize = parts.filter(|part| Some(part.0) == public).map(|part| part.1).sum();
        let num_shared =
            if tenant.scope() == TenantScope::Public { sequence.num_indexed as usize } else { shared };
        self.reach_with(tenant, &sequence.blocks[..num_shared])
    }

    /// Whether there can ever be `need` blocks for a waiting request: no end of another request makes room where
    /// something is published.
    pub(super) fn is_within_reach(&self, request: &Request, need: u32) -> Result<bool> {
        let tenant = &request.tenant;
        let public = tenant.scopes().and_then(|scopes| match tenant.scope() {
            TenantScope::Public => Some(&scopes.own),
            _ => scopes.public.as_ref().map(|public| &public.0),
        });
        let mut shared = Vec::new();
        let known = &request.prompt[..request.prompt.len() - 1];
        if let (true, Some(index), Some(public)) = (request.reuse, &self.index, public) {
            if self.config.is_grouped() {
                // It takes a look at what the other groups have.
                let pin = find_groups(Some(index), request, Reach::All, known, &self.config, &mut shared);
                let parts = pin.iter().flatten().flat_map(ChainPin::parts);
                shared.truncate(parts.filter(|part| part.0 == public.last()).map(|part| part.1).sum());
            } else {
                index.resident_blocks(public.last(), &request.keys(index, 0, known)?, &mut shared)?;
            }
        }
        Ok(need <= self.reach_with(tenant, &shared)?)
    }

    /// Blocks that somebody can ever have who has, or finds, `shared` blocks of his public scope (of his own, if he
    /// publishes). Those are not his tenant's to pay; and those of them that are published are there anyway.
    fn reach_with(&self, tenant: &Tenant, shared: &[BlockHandle]) -> Result<u32> {
        let num_shared = self.num_spared(shared.len()) as u32;
        let num_published = self.num_spared(self.published.num_of(shared)) as u32;
        let reachable = self.pool.reachable(tenant.account)?;
        if tenant.scope() == TenantScope::Public {
            return Ok((reachable + num_published).saturating_sub(self.pool.pinned(tenant.account)?));
        }
        let Some((_, public)) = tenant.scopes().and_then(|scopes| scopes.public.as_ref()) else {
            return Ok(reachable);
        };
        let (guaranteed, pinned) = (self.pool.quota(*public)?.guaranteed, self.pool.pinned(*public)?);
        let beside = self.pool.beside_others(tenant.account)? + guaranteed.max(pinned);
        let theirs = guaranteed.max(pinned + num_shared - num_published);
        let limit = self.pool.quota(tenant.account)?.limit;
        Ok((limit + num_shared).min((beside + num_shared).saturating_sub(theirs)))
    }

    /// After a promise to a tenant: under `strict`, what it has committed and cached stays within its limit.
    pub(super) fn keep_within_limit(&self, tenant: &Tenant) -> Result<()> {
        match &self.index {
            Some(index) if tenant.isolation == Isolation::Strict => {
                index.make_room(tenant.account, 0).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Lets a sequence's pin go. What was published stays, with what is kept of further groups, and what is to be kept
    /// after the sequence's end is held first.
    pub(super) fn let_pin_go(
        &mut self,
        sequence: &Sequence,
        pin: Option<ChainPin>,
        blocks: Vec<BlockHandle>,
        attached: Vec<BlockHandle>,
    ) -> Result<()> {
        let tenant = &sequence.request.tenant;
        let Some(pin) = pin else { return Ok(()) };
        if tenant.scope() == TenantScope::Public {
            if sequence.is_done() {
                let prefix = PublishedPrefix { owner: tenant.index, _pin: pin, blocks, attached };
                self.published.prefixes.push(prefix);
                self.pool.set_pinned(tenant.account, self.published.num_blocks(tenant))?;
            }
            return Ok(());
        }
        if sequence.ending.is_some() {
            self.keep_prefix(sequence)?;
        }
        drop(pin);
        Ok(())
    }
}

impl Scheduler {
    /// Withdraws all that was published with a public handle; returns how many prefixes there were. Nobody finds
    /// them from now on; requests that use them go on undisturbed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tenant is not of public scope or is of another scheduler;
    /// [`Error::WrongState`] if another thread is in the scheduler.
    pub fn unpublish(&self, tenant: &Tenant) -> Result<usize> {
        if tenant.scheduler != self.id || tenant.scope() != TenantScope::Public {
            let (name, scope) = (&tenant.name, tenant.scope().name());
            return Err(Error::invalid(format!(
                "tenant {name:?}, of {scope} scope, is not a public scope of this scheduler"
            )));
        }
        let mut core = self.enter()?;
        if let Some(index) = &self.index {
            index.purge(&ShareScope::Public(tenant.name.clone()));
        }
        let released = core.published.release(tenant, self.index.as_deref());
        core.pool.set_pinned(tenant.account, core.published.num_blocks(tenant))?;
        released
    }
}
