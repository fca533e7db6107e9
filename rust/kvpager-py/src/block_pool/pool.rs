//! `BlockPool`.

use super::handles::{Target, int, with_handles};
use super::reservation::PyReservation;
use super::stats::{PyAccountStats, PyPoolStats};
use super::wait::{deadline, wait};
use crate::error::{IntoPyResult, invalid};
use crate::fork::Home;
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota, StepEpoch};
use kvpager_core::{AccountId, BlockHandle, BlockId};
use pyo3::prelude::*;
use std::sync::Arc;

/// The blocks of a device.
#[pyclass(name = "BlockPool", module = "kvpager._core", frozen)]
pub(crate) struct PyBlockPool {
    pub(crate) inner: Arc<BlockPool>,
    home: Home,
}

impl PyBlockPool {
    fn here(&self) -> PyResult<&Arc<BlockPool>> {
        self.home.check()?;
        Ok(&self.inner)
    }

    fn limit(&self, limit: Option<&Bound<'_, PyAny>>, default: u32) -> PyResult<u32> {
        limit.map_or(Ok(default), |limit| int(limit, "limit"))
    }
}

fn account_id(account: &Bound<'_, PyAny>) -> PyResult<AccountId> {
    int(account, "account").map(AccountId)
}

fn handle(block: &Bound<'_, PyAny>) -> PyResult<BlockHandle> {
    int(block, "block").map(BlockHandle::from_bits)
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, *, max_accounts=None, max_open_steps=None))]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        max_accounts: Option<&Bound<'_, PyAny>>,
        max_open_steps: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let defaults = PoolConfig::default();
        let config = PoolConfig {
            num_blocks: int(num_blocks, "num_blocks")?,
            max_accounts: max_accounts.map_or(Ok(defaults.max_accounts), |n| int(n, "max_accounts"))?,
            max_open_steps: max_open_steps
                .map_or(Ok(defaults.max_open_steps), |n| int(n, "max_open_steps"))?,
        };
        Ok(Self { inner: BlockPool::new(config).py()?, home: Home::here() })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks()
    }

    #[pyo3(signature = (*, guaranteed=None, limit=None))]
    fn add_account(
        &self,
        guaranteed: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u32> {
        let pool = self.here()?;
        let guaranteed = guaranteed.map_or(Ok(0), |guaranteed| int(guaranteed, "guaranteed"))?;
        let limit = self.limit(limit, pool.num_blocks())?;
        Ok(pool.add_account(Quota { guaranteed, limit }).py()?.0)
    }

    fn quota(&self, account: &Bound<'_, PyAny>) -> PyResult<(u32, u32)> {
        let quota = self.here()?.quota(account_id(account)?).py()?;
        Ok((quota.guaranteed, quota.limit))
    }

    #[pyo3(signature = (account, *, guaranteed=None, limit=None))]
    fn set_quota(
        &self,
        account: &Bound<'_, PyAny>,
        guaranteed: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pool = self.here()?;
        let account = account_id(account)?;
        let old = pool.quota(account).py()?;
        let guaranteed = guaranteed.map_or(Ok(old.guaranteed), |guaranteed| int(guaranteed, "guaranteed"))?;
        let limit = self.limit(limit, old.limit)?;
        pool.set_quota(account, Quota { guaranteed, limit }).py()
    }

    fn available(&self, account: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.here()?.available(account_id(account)?).py()
    }

    fn reserve(&self, account: &Bound<'_, PyAny>, num_blocks: &Bound<'_, PyAny>) -> PyResult<PyReservation> {
        let reservation = self.here()?.reserve(account_id(account)?, int(num_blocks, "num_blocks")?).py()?;
        Ok(PyReservation::new(reservation, self.home))
    }

    #[pyo3(signature = (account, num_blocks=None, *, out=None))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        account: &Bound<'py, PyAny>,
        num_blocks: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let pool = self.here()?;
        let account = account_id(account)?;
        let target = Target::read(num_blocks, out)?;
        if target.len() > pool.num_blocks() as usize {
            // More than any limit: asked for without room for the answer, so that it is refused with the numbers.
            let count = u32::try_from(target.len()).unwrap_or(u32::MAX);
            drop(pool.reserve(account, count).py()?);
        }
        target.fill(py, |blocks| pool.allocate(account, blocks).py())
    }

    fn allocate_one(&self, account: &Bound<'_, PyAny>) -> PyResult<u64> {
        let mut block = [BlockHandle::new(0, BlockId(0))];
        self.here()?.allocate(account_id(account)?, &mut block).py()?;
        Ok(block[0].to_bits())
    }

    fn retain(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let pool = self.here()?;
        with_handles(blocks, |blocks| pool.retain(blocks))?.py()
    }

    fn release(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let pool = self.here()?;
        with_handles(blocks, |blocks| pool.release(blocks))?.py()
    }

    fn release_one(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        self.here()?.release(&[handle(block)?]).py()
    }

    fn is_exclusive(&self, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.here()?.is_exclusive(handle(block)?).py()
    }

    fn open_step(&self) -> PyResult<u64> {
        Ok(self.here()?.open_step().py()?.number())
    }

    fn close_step(&self, epoch: &Bound<'_, PyAny>) -> PyResult<()> {
        self.here()?.close_step(StepEpoch::from_number(int(epoch, "epoch")?)).py()
    }

    #[pyo3(signature = (num_blocks, timeout=None, *, account=None))]
    fn wait_for_blocks(
        &self,
        py: Python<'_>,
        num_blocks: &Bound<'_, PyAny>,
        timeout: Option<&Bound<'_, PyAny>>,
        account: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let pool = self.here()?;
        let count: u64 = int(num_blocks, "num_blocks")?;
        if count > u64::from(pool.num_blocks()) {
            return Err(invalid(format!("{count} blocks cannot come: the pool has {}", pool.num_blocks())));
        }
        let timeout = timeout.map(|timeout| {
            timeout.extract::<f64>().map_err(|_| invalid("timeout must be a number of seconds or None"))
        });
        let account = account.map(account_id).transpose()?;
        wait(py, pool, account, count, deadline(timeout.transpose()?)?)
    }

    fn stats(&self) -> PyResult<PyPoolStats> {
        Ok(PyPoolStats(self.here()?.stats()))
    }

    fn account_stats(&self, account: &Bound<'_, PyAny>) -> PyResult<PyAccountStats> {
        Ok(PyAccountStats(self.here()?.account_stats(account_id(account)?).py()?))
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.here()?.check_invariants().map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}
