//! `cargo bench -p kvpager-benches`: release and allocate a batch, one thread.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvpager_benches::{
    Array, Direct, Drawn, Magazines, MutexFifo, MutexVec, Peer, Pool, Quarantined, Reserved, Tenants, Worker,
};

const BLOCKS: u32 = 65_536;

fn measure<P: Peer>(criterion: &mut Criterion, name: &str, peer: &P) {
    let mut group = criterion.benchmark_group(name);
    for batch in [1, 16, 256] {
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
            let mut worker = Worker::new(peer, 0, batch);
            bencher.iter(|| worker.operate());
        });
    }
    group.finish();
}

fn block_pool(criterion: &mut Criterion) {
    let pool = || Pool::new(BLOCKS, 1, Tenants::Same);
    let fragmented = pool();
    fragmented.fragment(10);
    measure(criterion, "direct", &Direct(pool()));
    measure(criterion, "direct, guaranteed", &Direct(Pool::new(BLOCKS, 1, Tenants::Different)));
    measure(criterion, "reservation and back", &Reserved(pool(), 8_192));
    measure(criterion, "reservation, released", &Drawn(pool()));
    measure(criterion, "quarantine", &Quarantined(pool()));
    measure(criterion, "magazine", &Magazines(pool()));
    measure(criterion, "10 % free", &Direct(fragmented));
    measure(criterion, "Mutex<Vec>", &MutexVec::new(BLOCKS));
    measure(criterion, "Mutex<VecDeque>", &MutexFifo::new(BLOCKS));
    measure(criterion, "ArrayQueue", &Array::new(BLOCKS));
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = block_pool
}
criterion_main!(benches);
