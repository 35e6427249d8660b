//! Injected panics, for tests: `BRANCHFS_PANIC_ON` in the environment of a daemon that was built with debug assertions
//! lists, separated by commas, the points that panic: FUSE requests (`mkdir`), verbs (`history`), `background`, and the
//! phases of a transaction (`transaction-applied`).

/// Panics if `BRANCHFS_PANIC_ON` lists this point. Does nothing in a build without debug assertions.
pub fn panic_if_listed(name: &str) {
    #[cfg(debug_assertions)]
    {
        static LISTED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
        let listed = LISTED.get_or_init(|| std::env::var("BRANCHFS_PANIC_ON").unwrap_or_default());
        assert!(!listed.split(',').any(|listed| listed == name), "injected panic: {name}");
    }
    #[cfg(not(debug_assertions))]
    let _ = name;
}
