//! Whose cached blocks may go for whom.
//!
//! | level | an allocation by the account evicts | its own cached blocks |
//! |---|---|---|
//! | `open` | the block that is due, whoever has it (`strict` accounts excepted) | may go for others |
//! | `scoped` | its own first, then what others have beyond their guarantees | may go for others, down to its guarantee |
//! | `strict` | its own, when committed and cached blocks would pass its limit | go for nobody else |

use super::PrefixIndex;
use super::evictor::Whose;
use crate::block_pool::Reclaim;
use crate::error::{Error, Result};
use crate::ids::AccountId;

/// What a tenant may observe of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Nothing is hidden: for servers of one tenant.
    Open,
    /// Others' content is hidden, but for memory pressure and load.
    #[default]
    Scoped,
    /// What it sees of the cache is a function of its own requests and quota.
    Strict,
}

impl Isolation {
    /// Whose cached blocks go for an account of this level, first to last.
    pub(super) const fn order(self, account: AccountId) -> [Whose; 2] {
        match self {
            Self::Scoped => [Whose::Own(account), Whose::Shared(account)],
            // Of a strict account, its own are within its limit (`make_room`): what is in the way is others'.
            Self::Open | Self::Strict => [Whose::Shared(account), Whose::Own(account)],
        }
    }

    /// The level's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Scoped => "scoped",
            Self::Strict => "strict",
        }
    }
}

impl std::str::FromStr for Isolation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "open" => Ok(Self::Open),
            "scoped" => Ok(Self::Scoped),
            "strict" => Ok(Self::Strict),
            _ => Err(Error::invalid(format!(
                "isolation level {name:?} is not known; there are: open, scoped, strict"
            ))),
        }
    }
}

impl PrefixIndex {
    /// Sets the level of an account, before its first namespace. `scoped` is the default.
    ///
    /// # Errors
    /// `WrongState` if the account has a namespace already; `InvalidArgument` for an unknown account, or for
    /// `strict` with a guarantee that is not the limit: what is not promised can be taken by others.
    pub fn set_isolation(&self, account: AccountId, isolation: Isolation) -> Result<()> {
        let quota = self.pool.quota(account)?;
        if isolation == Isolation::Strict && quota.guaranteed != quota.limit {
            return Err(Error::invalid(format!(
                "strict isolation needs guaranteed = limit; account {account} has {} and {}",
                quota.guaranteed, quota.limit
            )));
        }
        if self.namespaces.all().any(|(_, namespace)| namespace.account == account) {
            return Err(Error::WrongState(format!("account {account} has namespaces already")));
        }
        self.evictor.set_isolation(account, isolation);
        if let (Some(learned), Isolation::Strict) = (&self.learned, isolation) {
            learned.set_apart(account);
        }
        Ok(())
    }

    /// The level of an account.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown account.
    pub fn isolation(&self, account: AccountId) -> Result<Isolation> {
        self.pool.quota(account)?;
        Ok(self.evictor.isolation(account))
    }

    /// Makes room for an allocation of a `strict` account: evicts its own cached blocks until they, what it has
    /// committed and `num_blocks` are within its limit. Nothing for other levels. To be called before every
    /// allocation, so that a strict account's evictions depend on its own numbers only.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown account.
    pub fn make_room(&self, account: AccountId, num_blocks: u32) -> Result<u32> {
        if self.isolation(account)? != Isolation::Strict {
            return Ok(0);
        }
        let stats = self.pool.account_stats(account)?;
        let excess = (stats.committed + stats.cached + u64::from(num_blocks)).saturating_sub(stats.limit);
        Ok(self.evict_of(Whose::Own(account), excess.min(stats.cached) as u32))
    }
}

impl PrefixIndex {
    /// Evicts up to `num_blocks` cached blocks for an account, whose as its level says; returns how many.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown account.
    pub fn evict_for(&self, account: AccountId, num_blocks: u32) -> Result<u32> {
        self.pool.quota(account)?;
        Ok(self.reclaim(account, num_blocks))
    }
}

impl Reclaim for PrefixIndex {
    fn reclaim(&self, account: AccountId, num_blocks: u32) -> u32 {
        let order = self.evictor.isolation(account).order(account);
        // Blocks that go with a home may be more than were asked for.
        order.into_iter().fold(0, |done, whose| done + self.evict_of(whose, num_blocks.saturating_sub(done)))
    }
}
