//! `BlockPool`.

use super::handles::{Target, with_handles};
use super::reservation::PyReservation;
use super::stats::{PyAccountStats, PyPoolStats};
use super::wait::{deadline, wait};
use crate::args::{int, int_of, optional_int, optional_int_of};
use crate::error::{IntoPyResult, invalid};
use crate::fork::Home;
use crate::kinds::optional_number;
use kvpager_core::block_pool::{self as core, BlockPool, PoolConfig, Quota, StepEpoch};
use kvpager_core::{AccountId, BlockHandle, BlockId};
use pyo3::prelude::*;
use std::sync::Arc;

const MAX_BLOCKS: u64 = core::MAX_BLOCKS as u64;
const MAX_ACCOUNTS: u64 = core::MAX_ACCOUNTS as u64;
const MAX_OPEN_STEPS: u64 = core::MAX_OPEN_STEPS as u64;

/// The blocks of a device.
#[pyclass(name = "BlockPool", module = "kvpager._core", frozen)]
pub(crate) struct PyBlockPool {
    pub(crate) inner: Arc<BlockPool>,
    pub(super) home: Home,
}

impl PyBlockPool {
    /// The pool, unless this is a child of its process.
    pub(crate) fn here(&self) -> PyResult<&Arc<BlockPool>> {
        self.home.check()?;
        Ok(&self.inner)
    }
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, *, max_accounts=None, max_open_steps=None))]
    fn new(
        #[pyo3(from_py_with = int_of::<1, MAX_BLOCKS, _>)] num_blocks: u32,
        #[pyo3(from_py_with = optional_int_of::<1, MAX_ACCOUNTS, _>)] max_accounts: Option<u32>,
        #[pyo3(from_py_with = optional_int_of::<1, MAX_OPEN_STEPS, _>)] max_open_steps: Option<u32>,
    ) -> PyResult<Self> {
        let defaults = PoolConfig::default();
        let config = PoolConfig {
            num_blocks,
            max_accounts: max_accounts.unwrap_or(defaults.max_accounts),
            max_open_steps: max_open_steps.unwrap_or(defaults.max_open_steps),
        };
        Ok(Self { inner: BlockPool::new(config).py()?, home: Home::here() })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks()
    }

    #[getter]
    fn num_accounts(&self) -> u32 {
        self.inner.num_accounts()
    }

    #[pyo3(signature = (*, guaranteed=None, limit=None))]
    fn add_account(
        &self,
        #[pyo3(from_py_with = optional_int)] guaranteed: Option<u32>,
        #[pyo3(from_py_with = optional_int)] limit: Option<u32>,
    ) -> PyResult<u32> {
        let pool = self.here()?;
        let quota =
            Quota { guaranteed: guaranteed.unwrap_or(0), limit: limit.unwrap_or_else(|| pool.num_blocks()) };
        Ok(pool.add_account(quota).py()?.0)
    }

    fn quota(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<(u32, u32)> {
        let quota = self.here()?.quota(AccountId(account)).py()?;
        Ok((quota.guaranteed, quota.limit))
    }

    #[pyo3(signature = (account, *, guaranteed=None, limit=None))]
    fn set_quota(
        &self,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = optional_int)] guaranteed: Option<u32>,
        #[pyo3(from_py_with = optional_int)] limit: Option<u32>,
    ) -> PyResult<()> {
        let (pool, account) = (self.here()?, AccountId(account));
        let old = pool.quota(account).py()?;
        let quota =
            Quota { guaranteed: guaranteed.unwrap_or(old.guaranteed), limit: limit.unwrap_or(old.limit) };
        pool.set_quota(account, quota).py()
    }

    fn reachable(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<u32> {
        self.here()?.reachable(AccountId(account)).py()
    }

    fn available(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<u64> {
        self.here()?.available(AccountId(account)).py()
    }

    fn reserve(
        &self,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = int)] num_blocks: u32,
    ) -> PyResult<PyReservation> {
        let reservation = self.here()?.reserve(AccountId(account), num_blocks).py()?;
        Ok(PyReservation::new(reservation, self.home))
    }

    #[pyo3(signature = (account, num_blocks=None, *, out=None))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = optional_int)] num_blocks: Option<usize>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (pool, account) = (self.here()?, AccountId(account));
        let target = Target::read(num_blocks, out)?;
        if target.len() > pool.num_blocks() as usize {
            // More than any limit: asked for without room for the answer, so that it is refused with the numbers.
            let asked = target.len() as u64;
            let count = u32::try_from(asked).unwrap_or(u32::MAX);
            drop(pool.reserve(account, count).map_err(|error| error.asked_for(asked)).py()?);
        }
        target.fill(py, |blocks| pool.allocate(account, blocks).py())
    }

    fn allocate_one(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<u64> {
        let mut block = [BlockHandle::new(0, BlockId(0))];
        self.here()?.allocate(AccountId(account), &mut block).py()?;
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

    fn release_one(&self, #[pyo3(from_py_with = int)] block: u64) -> PyResult<()> {
        self.here()?.release(&[BlockHandle::from_bits(block)]).py()
    }

    fn is_exclusive(&self, #[pyo3(from_py_with = int)] block: u64) -> PyResult<bool> {
        self.here()?.is_exclusive(BlockHandle::from_bits(block)).py()
    }

    fn open_step(&self) -> PyResult<u64> {
        Ok(self.here()?.open_step().py()?.number())
    }

    fn close_step(&self, #[pyo3(from_py_with = int)] epoch: u64) -> PyResult<()> {
        self.here()?.close_step(StepEpoch::from_number(epoch)).py()
    }

    fn epoch_closed(&self, #[pyo3(from_py_with = int)] epoch: u64) -> PyResult<bool> {
        Ok(self.here()?.epoch_closed(StepEpoch::from_number(epoch)))
    }

    #[pyo3(signature = (num_blocks, timeout=None, *, account=None))]
    fn wait_for_blocks(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] num_blocks: u64,
        #[pyo3(from_py_with = optional_number)] timeout: Option<f64>,
        #[pyo3(from_py_with = optional_int)] account: Option<u32>,
    ) -> PyResult<bool> {
        let (pool, count) = (self.here()?, num_blocks);
        if count > u64::from(pool.num_blocks()) {
            return Err(invalid(format!("num_blocks is {count}, must be 0 to {}", pool.num_blocks())));
        }
        wait(py, pool, account.map(AccountId), count, deadline(timeout)?)
    }

    fn stats(&self) -> PyResult<PyPoolStats> {
        Ok(PyPoolStats(self.here()?.stats()))
    }

    fn account_stats(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<PyAccountStats> {
        Ok(PyAccountStats(self.here()?.account_stats(AccountId(account)).py()?))
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.here()?.check_invariants().map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}
