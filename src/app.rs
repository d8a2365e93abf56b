//! Puts the parts together: configuration in, a running instance out.

use std::{
    error::Error, fmt::Display, future::Future, io, net::SocketAddr, num::NonZero, pin::pin,
    process::ExitCode, sync::Arc, thread, time::Duration,
};

use arc_swap::ArcSwap;
use tokio::{
    net::TcpListener,
    runtime::Builder,
    signal::unix::{SignalKind, signal},
    sync::{oneshot, watch},
};

use crate::{
    admin::{self, Admin},
    admission::Admission,
    cli,
    config::{self, AdminListen, Config, ConfigError, QuickOptions, Recovery, Secret, StoreKind},
    demo,
    log::Log,
    metrics::Metrics,
    proxy::Proxy,
    reason::Reason,
    reload::{Reloads, Source},
    server::{self, Workers},
    store::{MemoryStore, RedisStore, SlotStore, StoreError},
    systemd::{self, Progress, Sockets},
};

mod operator;

pub use operator::{evict, holders, limit, status};

/// How long an instance that stops waits until the store has acknowledged its last release.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);

/// How long it waits until stdout, and the collector of spans, have what is to be told of its requests.
const TELL_PATIENCE: Duration = Duration::from_secs(1);

/// An instance whose sockets are bound.
#[derive(Debug)]
pub struct App {
    config: Config,
    store: Arc<dyn SlotStore>,
    listener: TcpListener,
    admin: Option<TcpListener>,
    log: Arc<Log>,
    workers: Workers,
}

/// Why an instance didn't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A listener couldn't be bound.
    #[error("can't listen on {0}: {1}")]
    Bind(SocketAddr, io::Error),
    /// A thread couldn't be started.
    #[error("can't start a thread: {0}")]
    Workers(io::Error),
    /// The store can't be used.
    #[error("{0}")]
    Store(#[from] StoreError),
}

impl App {
    /// Binds every socket, so that addresses are known and taken before anything runs.
    ///
    /// # Errors
    /// [`StartError`] when an address can't be bound or the store is one that can't be used.
    pub async fn bind(config: Config, sockets: Sockets) -> Result<Self, StartError> {
        let store: Arc<dyn SlotStore> = match &config.store.kind {
            StoreKind::Memory => Arc::new(MemoryStore::new()),
            StoreKind::Redis(at) => {
                let strict = config.limits.iter().any(|limit| limit.recovery == Recovery::Strict);
                let store = RedisStore::new(at, &config.store, strict)?;
                match store.open().await {
                    Err(error @ StoreError::Unfit(_)) => return Err(error.into()),
                    // It may come yet, and until then `when_down` holds.
                    Err(error) => tracing::warn!(%error, "starting without the store"),
                    Ok(_) => {}
                }
                store
            }
        };
        Self::bind_with(config, store, sockets).await
    }

    /// Like [`App::bind`], with a store that others use as well.
    ///
    /// # Errors
    /// [`StartError::Bind`] when an address can't be bound.
    pub async fn bind_with(
        config: Config,
        store: Arc<dyn SlotStore>,
        sockets: Sockets,
    ) -> Result<Self, StartError> {
        let listener = listen(config.server.listen, sockets.clients).await?;
        let admin = match &config.admin {
            Some(admin) => Some(listen(admin.listen, sockets.operators).await?),
            None => None,
        };
        let (log, workers) = (Arc::new(Log::apart()), Workers::here());
        Ok(Self { config, store, listener, admin, log, workers })
    }

    /// Has this log follow the configuration.
    #[must_use]
    pub fn with_log(mut self, log: Arc<Log>) -> Self {
        self.log = log;
        self
    }

    /// Has connections served by these.
    #[must_use]
    pub fn with_workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("a bound listener has an address")
    }

    /// Where operators connect.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        let admin = self.admin.as_ref()?;
        Some(admin.local_addr().expect("a bound listener has an address"))
    }

    /// Serves until `stop`, then drains: readiness red, listener closed, waiters refused, streams finished or cut,
    /// slots back. Returns how many streams were cut. Meanwhile the configuration follows its source, if there is one.
    pub async fn run(
        self,
        stop: impl Future<Output = ()> + Send,
        mut reloads: Option<Reloads>,
    ) -> usize {
        let (draining, seen) = watch::channel(false);
        let mut running = Running::start(self.config, self.store, seen, self.log);
        // Whoever runs several in one process has its own words for how they do.
        if running.log.is_the_process() {
            tokio::spawn(admin::watch(Arc::downgrade(&running.admin)));
        }
        if let Some(listener) = self.admin {
            tokio::spawn(admin::serve(listener, Arc::clone(&running.admin)));
        }
        let (close, closed) = oneshot::channel();
        let proxy = Arc::clone(&running.proxy);
        let settings = running.settings.subscribe();
        let workers = Arc::new(self.workers);
        let served_by = Arc::clone(&workers);
        let serving =
            tokio::spawn(server::serve(self.listener, proxy, settings, served_by, async {
                let _ = closed.await;
            }));
        let mut stop = pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                loaded = next(&mut reloads) => running.follow(loaded),
            }
        }
        draining.send_replace(true);
        systemd::tell(Progress::Stopping);
        tokio::time::sleep(running.config.server.drain_delay).await;
        running.admission.drain();
        let _ = close.send(());
        let drained = serving.await.expect("the server doesn't panic");
        running.admission.leave(LEAVE_PATIENCE).await;
        running.proxy.load_full().flush(TELL_PATIENCE).await;
        // Not before: what is left of connections that were cut gives its slots back on them.
        drop(workers);
        drained.cut
    }
}

async fn next(reloads: &mut Option<Reloads>) -> Result<Config, ConfigError> {
    match reloads {
        Some(reloads) => reloads.next().await,
        None => std::future::pending().await,
    }
}

/// What one configuration made, and what takes the next one's in its place.
struct Running {
    config: Config,
    metrics: Arc<Metrics>,
    admission: Arc<Admission>,
    proxy: Arc<ArcSwap<Proxy>>,
    admin: Arc<ArcSwap<Admin>>,
    settings: watch::Sender<config::Server>,
    draining: watch::Receiver<bool>,
    log: Arc<Log>,
}

impl Running {
    fn start(
        config: Config,
        store: Arc<dyn SlotStore>,
        draining: watch::Receiver<bool>,
        log: Arc<Log>,
    ) -> Self {
        log.adopt(&config.log);
        let metrics = Metrics::new(&config);
        let admission = Admission::start(&config, store, Arc::clone(&metrics));
        let proxy =
            Proxy::new(&config, Arc::clone(&admission), Arc::clone(&metrics), Arc::clone(&log));
        let (upstreams, registry) = (proxy.upstreams(), proxy.registry());
        let proxy = Arc::new(ArcSwap::new(proxy));
        let requests = Arc::downgrade(&proxy);
        admission.cut_by(move |holder| {
            requests.upgrade().is_some_and(|proxy| proxy.load().cut(holder, Reason::Evicted))
        });
        let admin = Admin::new(
            &config,
            Arc::clone(&admission),
            Arc::clone(&metrics),
            upstreams,
            registry,
            draining.clone(),
            Arc::clone(&log),
        );
        Self {
            proxy,
            admin: Arc::new(ArcSwap::new(admin)),
            settings: watch::Sender::new(config.server.clone()),
            config,
            metrics,
            admission,
            draining,
            log,
        }
    }

    /// Goes on by what was read, if that can be.
    fn follow(&mut self, loaded: Result<Config, ConfigError>) {
        systemd::tell(Progress::Reloading);
        let checked = loaded.and_then(|config| {
            config.check_follows(&self.config)?;
            Ok(config)
        });
        self.metrics.reloads().note(checked.is_ok());
        match checked {
            Ok(config) => {
                self.adopt(config);
                tracing::info!("the new configuration is in force");
            }
            Err(error) => {
                tracing::error!("the configuration stays as it was: {}", error.plain());
            }
        }
        systemd::tell(Progress::Ready);
    }

    /// Newcomers are served by this configuration. Whoever runs goes on by the one it began with, and holds it as long.
    fn adopt(&mut self, config: Config) {
        self.log.adopt(&config.log);
        self.metrics = self.metrics.adopt(&config);
        self.admission = self.admission.adopt(&config, Arc::clone(&self.metrics));
        let (admission, metrics) = (&self.admission, &self.metrics);
        let before = self.proxy.load();
        let log = &self.log;
        let proxy =
            before.adopt(&config, Arc::clone(admission), Arc::clone(metrics), Arc::clone(log));
        self.admin.store(Admin::new(
            &config,
            Arc::clone(admission),
            Arc::clone(metrics),
            proxy.upstreams(),
            proxy.registry(),
            self.draining.clone(),
            Arc::clone(log),
        ));
        self.proxy.store(proxy);
        self.settings.send_if_modified(|server| {
            let is_other = *server != config.server;
            server.clone_from(&config.server);
            is_other
        });
        self.config = config;
    }
}

/// The socket that was handed over, wherever it listens, or a new one.
async fn listen(
    address: SocketAddr,
    handed: Option<std::net::TcpListener>,
) -> Result<TcpListener, StartError> {
    let listener = match handed {
        Some(socket) => TcpListener::from_std(socket),
        None => TcpListener::bind(address).await,
    };
    listener.map_err(|error| StartError::Bind(address, error))
}

// === the process ===

/// Runs an instance until a signal ends it. SIGTERM or SIGINT drains; a second one ends at once.
/// SIGHUP and a change of the file load the configuration anew.
pub fn main(
    config: Config,
    source: Source,
    sockets: Sockets,
    threads: Option<usize>,
    log: Arc<Log>,
) -> ExitCode {
    // Before anything is bound, which may have something to say.
    log.adopt(&config.log);
    let threads =
        threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get));
    on_runtime(async {
        let workers = Workers::start(threads).map_err(StartError::Workers)?;
        let app = App::bind(config, sockets).await?.with_log(log).with_workers(workers);
        let reloads = Reloads::of(source);
        let admin = app.admin_addr().map(tracing::field::display);
        tracing::info!(listen = %app.addr(), admin, "listening");
        systemd::tell(Progress::Ready);
        let cut = app.run(stop_signal(), Some(reloads)).await;
        tracing::info!(cut, "stopped");
        Ok::<_, StartError>(())
    })
}

/// Shows a limit at work: a sample provider, two instances on one embedded store, and more clients than slots.
pub fn demo(options: &cli::Demo) -> ExitCode {
    let slots = options.slots as usize;
    on_runtime(async {
        if let Some(addr) = options.provider_only {
            let provider = demo::Provider::start_at(addr, slots).await?;
            println!("a provider that refuses above {slots} listens at {}", provider.addr());
            stop_signal().await;
            return Ok(());
        }
        let provider = demo::Provider::start(slots).await?;
        let store: Arc<dyn SlotStore> = Arc::new(MemoryStore::new());
        let (mut addrs, mut instances) = (Vec::new(), Vec::new());
        let (stop, stopped) = watch::channel(());
        for _ in 0..2 {
            let config = Config::quick(QuickOptions {
                listen: "127.0.0.1:0".to_owned(),
                upstream: format!("http://{}", provider.addr()),
                slots: options.slots,
                store_url: Secret("memory:".to_owned()),
                admin_listen: Some(AdminListen::Off),
            })?;
            let app = App::bind_with(config, Arc::clone(&store), Sockets::default()).await?;
            addrs.push(app.addr());
            let mut stopped = stopped.clone();
            let stopped = async move {
                let _ = stopped.changed().await;
            };
            instances.push(tokio::spawn(app.run(stopped, None)));
        }
        let mut show = demo::Options::for_slots(slots);
        show.duration = options.duration;
        show.terminal &= !options.plain;
        let summary = demo::drive(provider, addrs, show).await?;
        drop(stop);
        for instance in instances {
            instance.await?;
        }
        print!("{summary}");
        Ok::<_, Box<dyn Error + Send + Sync>>(())
    })
}

fn on_runtime<E: Display>(main: impl Future<Output = Result<(), E>>) -> ExitCode {
    let runtime =
        Builder::new_current_thread().enable_all().build().expect("the runtime can be started");
    let ended = runtime.block_on(main);
    // Whatever still runs has had its time.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidegate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Sets up what is one per process: the log and the provider of TLS.
pub fn init() -> Arc<Log> {
    let log = Log::start();
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    log
}

/// Resolves at the first SIGTERM or SIGINT; the next one ends the process at once.
async fn stop_signal() {
    let mut terminate = signal(SignalKind::terminate()).expect("signals can be watched");
    let mut interrupt = signal(SignalKind::interrupt()).expect("signals can be watched");
    let mut next = async move || {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    };
    let signal = next().await;
    tracing::info!(signal, "draining; a second signal ends at once");
    tokio::spawn(async move {
        let signal = next().await;
        tracing::warn!(signal, "ending at once");
        std::process::exit(1);
    });
}
