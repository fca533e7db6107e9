//! Copies `cuda/` into the build output, from where maturin puts it into the wheel as `kvpager/cuda/`.
//!
//! The copy is emptied first, so a deleted kernel cannot ship, and every folder is watched as well as every
//! file, so a new kernel is seen.

use std::path::Path;
use std::{env, fs, io};

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    println!("cargo::rerun-if-changed={}", from.display());
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() {
            copy_tree(&path, &to.join(name))?;
        } else {
            println!("cargo::rerun-if-changed={}", path.display());
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let manifest = env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?;
    let out = env::var("OUT_DIR").map_err(io::Error::other)?;
    let target = Path::new(&out).join("cuda");
    if target.exists() {
        fs::remove_dir_all(&target)?;
    }
    copy_tree(&Path::new(&manifest).join("../../cuda"), &target)
}
